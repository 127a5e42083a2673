"""What every worker did when: spans, noted without a lock into a bounded buffer.

A worker notes on its own `Track`; whoever reports drains it. A track that is not drained in time
forgets its oldest spans, and counts them: noting never waits.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

LIMIT = 20_000
"""Spans that a track holds until they are drained: some megabytes at most."""

COMPUTE, WAIT, LINK, QUEUE = "compute", "wait", "link", "queue"
"""Kinds: a fragment at work; waiting for another worker; something handed to one; and, which is
nobody's time, how long something lay in a link before the worker took it."""
ROOM = "room"
"""What is waited for where others have enough: every other wait is for what others make."""


class Span(NamedTuple):
    """One thing that a worker did."""

    kind: str
    name: str
    """The fragment, what was waited for, or the boundary whose link was used."""
    start: float
    """Seconds on the clock of the process that reports, `time.perf_counter`."""
    seconds: float
    calls: int = 1
    """How often, where many short ones are noted together: the steps of an unroll."""
    nbytes: int = 0
    items: int = 0
    """Environment steps, messages, or how many of them lay in a queue."""
    version: int = -1
    """Of the weights; -1 where that says nothing."""
    staleness: int = -1


class Track:
    """One worker's spans. `add` is called by the worker alone, `drain` by who reports."""

    def __init__(self, worker: str, limit: int = LIMIT) -> None:
        self.worker = worker
        self._limit = limit
        self._spans: deque[Span] = deque(maxlen=limit)
        self._added = self._drained = 0
        self.paused: float | None = None
        """When the worker was last done with what was asked of it."""

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
        """Notes a span."""
        self._spans.append(
            Span(kind, name, start, seconds, calls, nbytes, items, version, staleness)
        )
        self._added += 1

    def extend(self, spans: Iterable[Span]) -> None:
        """Notes spans of another process, on this one's clock."""
        for span in spans:
            self._spans.append(span)
            self._added += 1

    def drain(self) -> list[Span]:
        """The spans since the last call."""
        found: list[Span] = []
        while len(found) < self._limit:
            try:
                found.append(self._spans.popleft())
            except IndexError:
                break
        self._drained += len(found)
        return found

    @property
    def dropped(self) -> int:
        """Spans that were forgotten before anybody drained them."""
        return max(0, self._added - self._drained - len(self._spans))


def on_clock(spans: Iterable[Span], ahead: float) -> list[Span]:
    """Spans of a process whose clock is `ahead` seconds before ours, on ours."""
    return [span._replace(start=span.start - ahead) for span in spans]


def clock_ahead(called: float, answered: float, begun: float, done: float) -> float:
    """How far another process's clock is ahead of ours: it began and was done at these times of its
    own, was called and answered at these of ours, and both ways take alike."""
    return ((begun - called) + (done - answered)) / 2
