"""The link between a learner and its actors: weights go out by version, results come back.

Staleness is kept here, by not letting an actor begin an unroll that would be too old when it is
learned from. Ordered, unroll number k is made by the weights of version k - staleness, and an
update takes one unroll of every actor: a run repeats exactly. Unordered, an update takes the
unrolls that have arrived, and one that is too old all the same, because its actor was slow, is
dropped and counted.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dovetail.runtime.programs import Values
from dovetail.runtime.watch import Watch


class Closed(Exception):
    """The run ends: nothing will come over this link any more."""


@dataclass(frozen=True)
class Parcel:
    """What an actor sends after an unroll."""

    copy: int
    """Which actor sends it."""
    turn: int
    version: int
    """Of the weights that made it."""
    values: Values
    actor: list[Any] = field(default_factory=list)
    """The actor's state after the unroll."""
    episodes: list[Any] = field(default_factory=list)
    releases: list[Callable[[], None]] = field(default_factory=list)
    """Called when the arrays have been read and may be written again."""


class Exchange:
    """One learner, `actors` actors; each update takes `joined` parcels."""

    def __init__(self, actors: int, joined: int, staleness: int, ordered: bool) -> None:
        self.dropped = 0
        """Parcels that came too late to be learned from."""
        self._joined, self._staleness, self._ordered = joined, staleness, ordered
        self._first = self._latest = 0
        self._weights: dict[int, Values] = {}
        self._queues: list[deque[Parcel]] = [deque() for _ in range(actors)]
        self._arrived: deque[Parcel] = deque()
        self._outstanding = self._learning = 0
        self._changed = threading.Condition()
        self._closed = False

    def begin_at(self, version: int) -> None:
        """The version of the first weights; before anything is put."""
        self._first = self._latest = version

    def put_weights(self, version: int, values: Values) -> None:
        """The learner's weights after `version` updates."""
        with self._changed:
            self._weights[version] = values
            self._latest = version
            self._weights.pop(version - self._staleness - 1, None)
            self._outstanding -= self._learning
            self._learning = 0
            self._changed.notify_all()

    def take_weights(self, turn: int, watch: Watch) -> tuple[int, Values]:
        """(version, weights) for an actor's unroll number `turn`; waits until it may begin."""
        with self._changed:
            if self._ordered:
                wanted = max(self._first, turn - self._staleness)
                self._wait(lambda: wanted in self._weights, watch, f"weights of version {wanted}")
                return wanted, self._weights[wanted]
            limit = self._joined * (self._staleness + 1)
            self._wait(
                lambda: bool(self._weights) and self._outstanding < limit,
                watch,
                f"leave to begin: {limit} unrolls wait for the learner",
            )
            self._outstanding += 1
            return self._latest, self._weights[self._latest]

    def abandon(self) -> None:
        """An unroll that was begun will not come."""
        with self._changed:
            self._outstanding -= 1
            self._changed.notify_all()

    def put(self, parcel: Parcel, watch: Watch) -> None:
        """An actor's results; ordered, it waits while as many are queued as may be."""
        with self._changed:
            if self._ordered:
                queue = self._queues[parcel.copy]
                self._wait(lambda: len(queue) <= self._staleness, watch, "the learner")
                queue.append(parcel)
            else:
                self._arrived.append(parcel)
            self._changed.notify_all()

    def take(self, turn: int, watch: Watch) -> list[Parcel]:
        """The parcels of the learner's update number `turn`."""
        with self._changed:
            if self._ordered:
                self._wait(lambda: all(self._queues), watch, "unrolls of every actor")
                self._changed.notify_all()
                return [queue.popleft() for queue in self._queues]
            self._wait(lambda: self._enough(turn), watch, f"{self._joined} unrolls")
            self._learning = self._joined
            oldest = sorted(self._arrived, key=lambda parcel: parcel.version)
            self._arrived = deque(oldest[self._joined :])
            return oldest[: self._joined]

    def close(self) -> None:
        """Wakes everyone who waits; they get `Closed`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _enough(self, turn: int) -> bool:
        """Whether an update can begin; what is too old by now is dropped, and counted."""
        fresh = [p for p in self._arrived if turn - p.version <= self._staleness]
        late = len(self._arrived) - len(fresh)
        if late:
            for parcel in self._arrived:
                if turn - parcel.version > self._staleness:
                    for release in parcel.releases:
                        release()
            self._arrived = deque(fresh)
            self.dropped += late
            self._outstanding -= late
            self._changed.notify_all()
        return len(fresh) >= self._joined

    def _wait(self, ready: Callable[[], bool], watch: Watch, what: str) -> None:
        if ready() and not self._closed:
            return
        with watch.waiting(what):
            while not self._closed and not ready():
                self._changed.wait()
        if self._closed:
            raise Closed(what)


def staleness_counts(parcels: list[Parcel], turn: int) -> list[int]:
    """How many versions behind each parcel is in update number `turn`."""
    return [turn - parcel.version for parcel in parcels]
