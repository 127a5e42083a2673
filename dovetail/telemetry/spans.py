"""Spans: each worker's timed activities, recorded without a lock in a bounded buffer.

A worker adds to its own `Track`; the reporting thread drains it. A full track drops its oldest
spans and counts them, so that adding never blocks.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

LIMIT = 20_000
"""Maximum number of undrained spans in a track: a few megabytes."""

COMPUTE, WAIT, LINK, QUEUE = "compute", "wait", "link", "queue"
"""Kinds of spans: running a fragment; waiting for another worker; sending over a link; and the time
that a message lay in a channel before the worker took it, which is not the worker's own time."""
ROOM = "room"
"""The name of waits for room in an output channel; all other waits are for input."""


class Span(NamedTuple):
    """One timed activity of a worker."""

    kind: str
    name: str
    """The fragment, the awaited input, or the boundary whose link was used."""
    start: float
    """`time.perf_counter()` of the reporting process, in seconds."""
    seconds: float
    calls: int = 1
    """Number of calls, where many short ones share a span: the steps of an unroll."""
    nbytes: int = 0
    items: int = 0
    """Number of environment steps or messages; for a queue, the number waiting in it."""
    version: int = -1
    """The version of the weights; -1 if not applicable."""
    staleness: int = -1
    """The staleness of a trajectory; -1 if not applicable."""


class Track:
    """One worker's spans. Only the worker calls `add`; only the reporting thread calls `drain`.

    No lock is needed: appends and pops of a deque are atomic.
    """

    def __init__(self, worker: str, limit: int = LIMIT) -> None:
        self.worker = worker
        self._limit = limit
        self._spans: deque[Span] = deque(maxlen=limit)
        self._added = self._drained = 0
        self.paused: float | None = None
        """`time.perf_counter()` when the worker last finished its requested work."""

    def add(
        self,
        kind: str,
        name: str,
        start: float,
        seconds: float,
        calls: int = 1,
        nbytes: int = 0,
        items: int = 0,
        version: int = -1,
        staleness: int = -1,
    ) -> None:
        """Adds a span."""
        self._spans.append(
            Span(kind, name, start, seconds, calls, nbytes, items, version, staleness)
        )
        self._added += 1

    def extend(self, spans: Iterable[Span]) -> None:
        """Adds spans of another process, already converted to this process's clock."""
        for span in spans:
            self._spans.append(span)
            self._added += 1

    def drain(self) -> list[Span]:
        """Removes and returns the spans since the last call."""
        found: list[Span] = []
        while len(found) < self._limit:  # bounded: the worker may add as fast as we drain
            try:
                found.append(self._spans.popleft())
            except IndexError:
                break
        # Only this thread writes it, and only the worker writes `_added`: no update is lost.
        self._drained += len(found)
        return found

    @property
    def dropped(self) -> int:
        """Number of spans dropped before they were drained."""
        return max(0, self._added - self._drained - len(self._spans))


def on_clock(spans: Iterable[Span], ahead: float) -> list[Span]:
    """Converts spans of a process whose clock is `ahead` seconds ahead of ours to our clock."""
    return [span._replace(start=span.start - ahead) for span in spans]


def clock_ahead(called: float, answered: float, begun: float, done: float) -> float:
    """Estimates by how many seconds another process's clock is ahead of ours.

    `called` and `answered` are times on our clock, `begun` and `done` on the other one. Like NTP,
    it assumes equal delays in both directions.
    """
    return ((begun - called) + (done - answered)) / 2
