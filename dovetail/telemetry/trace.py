"""A run's spans as a trace for Perfetto or Chrome: a track per worker, arrows along the links."""

import json
from pathlib import Path
from typing import Any

from dovetail.errors import UserError
from dovetail.run import Run, write_atomically
from dovetail.telemetry.spans import COMPUTE, LINK, WAIT, Span
from dovetail.telemetry.timeline import SPANS, load_spans

COLOURS = {COMPUTE: "good", WAIT: "grey", LINK: "yellow"}
SECONDS = 10.0


def write_trace(
    run: str | Path | Run, path: str | Path | None = None, seconds: float = SECONDS
) -> Path:
    """Writes the last `seconds` of a run that were kept; returns the file's path."""
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
    """The events of the last `seconds`, in the order in which they began."""
    end = max((s.start + s.seconds for _, s in spans), default=0.0)
    kept = [(w, s) for w, s in spans if s.start >= end - seconds]
    kept.sort(key=lambda pair: pair[1].start)
    workers = {worker: i + 1 for i, worker in enumerate(dict.fromkeys(w for w, _ in kept))}
    zero = min((s.start for _, s in kept), default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": worker}}
        for worker, tid in workers.items()
    ]
    for worker, span in kept:
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": workers[worker],
                "name": f"waits for {span.name}" if span.kind == WAIT else span.name,
                "cat": span.kind,
                "cname": COLOURS[span.kind],
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
    """From what was handed over to the next thing that another worker computed with it."""
    events: list[dict[str, Any]] = []
    computed = [(w, s) for w, s in spans if s.kind == COMPUTE]
    number = 0
    for worker, span in spans:
        if span.kind != LINK or span.name == "message":
            continue
        done = span.start + span.seconds
        taker = next(((w, s) for w, s in computed if w != worker and s.start >= done), None)
        if taker is None:
            continue
        number += 1
        arrow: dict[str, Any] = {"pid": 1, "name": span.name, "cat": LINK, "id": number}
        start = {"ph": "s", "tid": workers[worker], "ts": 1e6 * (span.start - zero)}
        ended = 1e6 * (taker[1].start - zero)
        finish = {"ph": "f", "bp": "e", "tid": workers[taker[0]], "ts": ended}
        events += [arrow | start, arrow | finish]
    return events
