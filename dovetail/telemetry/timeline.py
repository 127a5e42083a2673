"""Aggregates the spans of a run: totals by worker and name, and a window of the latest spans.

Totals cover the whole run in constant space. The window keeps individual spans for traces.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.run.folder import Run, write_atomically
from dovetail.telemetry.spans import COMPUTE, LINK, QUEUE, WAIT, Span

WINDOW = 50_000
"""Number of individual spans to keep: about 10 MB."""
WRITE_SECONDS = 5.0
"""Interval at which telemetry.json is rewritten."""
FIRST_BUCKET, PER_OCTAVE, BUCKETS = 1e-7, 4, 128
"""Histogram of durations: buckets a quarter of an octave wide, from 0.1 µs to minutes."""
FILE, SPANS = "telemetry.json", "spans.npz"
FORMAT = 1


@dataclass
class Totals:
    """The sums over all spans of one worker, kind and name."""

    calls: int = 0
    spans: int = 0
    seconds: float = 0.0
    nbytes: int = 0
    items: int = 0
    buckets: Counter[int] = field(default_factory=Counter)

    def add(self, span: Span) -> None:
        """Adds a span."""
        self.calls += span.calls
        self.spans += 1
        self.seconds += span.seconds
        self.nbytes += span.nbytes
        self.items += span.items
        each = span.seconds / max(span.calls, 1)
        # Logarithmic buckets: equal relative precision from microseconds to minutes.
        octaves = math.log2(max(each, FIRST_BUCKET) / FIRST_BUCKET)
        self.buckets[min(BUCKETS - 1, int(octaves * PER_OCTAVE))] += span.calls

    def quantile(self, share: float) -> float:
        """The quantile of the calls' durations in seconds, rounded up to a bucket."""
        wanted, seen = share * self.calls, 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= wanted:
                return FIRST_BUCKET * 2 ** ((bucket + 1) / PER_OCTAVE)
        return 0.0

    def to_json(self) -> dict[str, Any]:
        """The entry in telemetry.json."""
        return {
            "calls": self.calls,
            "spans": self.spans,
            "seconds": self.seconds,
            "bytes": self.nbytes,
            "items": self.items,
            "p50": self.quantile(0.5),
            "p99": self.quantile(0.99),
        }


class Timeline:
    """The spans of all workers of a run. Used by the driver thread only."""

    def __init__(self) -> None:
        self.totals: dict[tuple[str, str, str], Totals] = {}
        self.staleness: Counter[int] = Counter()
        self.dropped = 0
        self.measures: dict[str, float] = {}
        self._window: deque[tuple[str, Span]] = deque(maxlen=WINDOW)
        self._extent: dict[str, list[float]] = {}
        self._written = -math.inf

    def add(self, spans: Mapping[str, Sequence[Span]]) -> None:
        """Adds spans by worker."""
        for worker, own in spans.items():
            for span in own:
                key = worker, span.kind, span.name
                if key not in self.totals:
                    self.totals[key] = Totals()
                self.totals[key].add(span)
                if span.staleness >= 0:
                    self.staleness[span.staleness] += 1
                # Bounded: beyond `WINDOW` spans the oldest leave.
                self._window.append((worker, span))
                if span.kind == QUEUE:  # it may have begun before the worker's first own span
                    continue
                extent = self._extent.setdefault(worker, [span.start, span.start])
                extent[1] = max(extent[1], span.start + span.seconds)

    def note(self, worker: str, kind: str, name: str, start: float) -> None:
        """Adds a span that ends now."""
        self.add({worker: [Span(kind, name, start, time.perf_counter() - start)]})

    def to_json(self) -> dict[str, Any]:
        """The totals as in telemetry.json, with workers in order of first appearance."""
        workers: dict[str, Any] = {}
        for (worker, kind, name), totals in self.totals.items():
            first, last = self._extent.get(worker, (0.0, 0.0))
            of = workers.setdefault(
                worker, {"wall_s": last - first, COMPUTE: {}, WAIT: {}, LINK: {}, QUEUE: {}}
            )
            of[kind][name] = totals.to_json()
        return {
            "format": FORMAT,
            "workers": workers,
            "staleness": {str(k): v for k, v in sorted(self.staleness.items())},
            "dropped_spans": self.dropped,
            "measures": self.measures,
        }

    def write(self, run: Run, last: bool = False) -> None:
        """Writes telemetry.json if it is due; with `last`, also the window of spans."""
        now = time.monotonic()
        if last or now - self._written >= WRITE_SECONDS:
            self._written = now
            run.write_json(FILE, self.to_json())
        if last:
            self._write_spans(run.path / SPANS)

    def _write_spans(self, path: Path) -> None:
        """Writes the window as one table, with the names as indices into lists."""
        workers = list(dict.fromkeys(worker for worker, _ in self._window))
        names = list(dict.fromkeys((s.kind, s.name) for _, s in self._window))
        places = {worker: i for i, worker in enumerate(workers)}
        kinds = {name: i for i, name in enumerate(names)}
        rows = [
            (
                *(places[worker], kinds[s.kind, s.name], s.start, s.seconds, s.calls),
                *(s.nbytes, s.items, s.version, s.staleness),
            )
            for worker, s in self._window
        ]
        # One array of floats, which is exact for integers below 2⁵³.
        table = np.array(rows, np.float64).reshape(-1, 9)
        save_spans(path, workers, names, table)


def save_spans(
    path: Path, workers: list[str], names: list[tuple[str, str]], table: np.ndarray
) -> None:
    """Writes spans as numpy arrays, atomically."""
    # Only at the end of a run.
    import io

    buffer = io.BytesIO()
    kinds = np.array([kind for kind, _ in names], np.str_)
    called = np.array([name for _, name in names], np.str_)
    np.savez_compressed(
        buffer, workers=np.array(workers, np.str_), kinds=kinds, names=called, spans=table
    )
    write_atomically(path, buffer.getvalue())


def load_spans(path: Path) -> list[tuple[str, Span]]:
    """Reads the (worker, span) pairs of a run."""
    with np.load(path, allow_pickle=False) as found:
        workers, kinds, names = found["workers"], found["kinds"], found["names"]
        return [
            (
                str(workers[int(row[0])]),
                Span(
                    str(kinds[int(row[1])]),
                    str(names[int(row[1])]),
                    float(row[2]),
                    float(row[3]),
                    *(int(value) for value in row[4:]),
                ),
            )
            for row in found["spans"]
        ]
