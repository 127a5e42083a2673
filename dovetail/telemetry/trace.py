"""Writes a run's spans as a trace for Perfetto or Chrome: a track per worker, arrows for links."""

import json
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any

from dovetail.errors import UserError
from dovetail.run.folder import Run, write_atomically
from dovetail.telemetry.spans import COMPUTE, LINK, QUEUE, WAIT, Span
from dovetail.telemetry.timeline import SPANS, load_spans

COLORS = {COMPUTE: "good", WAIT: "gray", LINK: "yellow"}
SECONDS = 10.0


def write_trace(
    run: str | Path | Run, path: str | Path | None = None, seconds: float = SECONDS
) -> Path:
    """Writes a trace of the last `seconds` of a run's kept spans; returns the file's path."""
    opened = run if isinstance(run, Run) else Run.open(run)
    try:
        spans = load_spans(opened.path / SPANS)
    except FileNotFoundError as error:
        raise UserError(
            f"{opened.path} has no {SPANS}: it is written when a run ends, by this version of "
            f"Dovetail."
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{opened.path / SPANS} cannot be read ({error}).") from error
    target = Path(path) if path is not None else opened.path / "trace.json"
    events = trace_events(spans, seconds)
    write_atomically(target, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
    return target


def trace_events(spans: list[tuple[str, Span]], seconds: float) -> list[dict[str, Any]]:
    """The trace events of the last `seconds`, ordered by start time."""
    end = max((s.start + s.seconds for _, s in spans), default=0.0)
    kept = [(w, s) for w, s in spans if s.start >= end - seconds]
    # The arrows search the starts by bisection.
    kept.sort(key=lambda pair: pair[1].start)
    workers = {worker: i + 1 for i, worker in enumerate(dict.fromkeys(w for w, _ in kept))}
    zero = min((s.start for _, s in kept), default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": worker}}
        for worker, tid in workers.items()
    ]
    for worker, span in kept:
        if span.kind == QUEUE:  # becomes an arrow below
            continue
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": workers[worker],
                "name": f"waits for {span.name}" if span.kind == WAIT else span.name,
                "cat": span.kind,
                "cname": COLORS[span.kind],
                # Microseconds, as the format wants.
                "ts": 1e6 * (span.start - zero),
                "dur": 1e6 * span.seconds,
                "args": {
                    "calls": span.calls,
                    "bytes": span.nbytes,
                    "items": span.items,
                    "version": span.version,
                },
            }
        )
    return events + _arrows(kept, workers, zero)


def _arrows(
    spans: list[tuple[str, Span]], workers: dict[str, int], zero: float
) -> list[dict[str, Any]]:
    """Arrows from a put on a link to the receiver's next computation.

    Spans carry no message ids: the last put before a message's queue time is taken for its own.
    """
    sent: dict[str, list[tuple[float, str]]] = {}
    computed: dict[str, list[float]] = {}
    for worker, span in spans:
        if span.kind == LINK:
            sent.setdefault(span.name, []).append((span.start, worker))
        elif span.kind == COMPUTE:
            computed.setdefault(worker, []).append(span.start)
    events: list[dict[str, Any]] = []
    for number, (taker, span) in enumerate(spans):
        if span.kind != QUEUE:
            continue
        puts, starts = sent.get(span.name, []), computed.get(taker, [])
        # The put begins before the message is in the channel.
        put = bisect_right(puts, span.start, key=lambda pair: pair[0]) - 1
        used = bisect_left(starts, span.start + span.seconds)
        if put < 0 or used == len(starts):  # one end is outside the window
            continue
        begun, sender = puts[put]
        arrow: dict[str, Any] = {"pid": 1, "name": span.name, "cat": LINK, "id": number}
        start = {"ph": "s", "tid": workers[sender], "ts": 1e6 * (begun - zero)}
        finish = {"ph": "f", "bp": "e", "tid": workers[taker], "ts": 1e6 * (starts[used] - zero)}
        events += [arrow | start, arrow | finish]
    return events
