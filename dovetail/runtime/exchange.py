"""The link between a learner and its actors: weights go out by version, results come back.

Staleness is kept here, by not letting an actor begin an unroll that would be too old when it is
learned from. Ordered, unroll number k is made by the weights of version k - staleness, and an
update takes one unroll of every actor: a run repeats exactly. Unordered, an update takes the
unrolls that have arrived, and one that is too old all the same, because its actor was slow, is
dropped and counted.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dovetail.runtime.programs import Values
from dovetail.runtime.report import Part
from dovetail.runtime.watch import Watch

LEAVE, ROOM, RESULTS = range(3)
"""What somebody sleeps for: to begin an unroll, to put one down, to get some."""
ENOUGH = "the learner, who has enough unrolls"
"""What an actor waits for that is ahead of the learner."""


class Closed(Exception):
    """The run ends: nothing will come over this link any more."""


@dataclass
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
    sent: float = 0.0
    """When it was put on the link."""


class Exchange:
    """One learner, `actors` actors; each update takes `joined` parcels.

    Who waits sleeps on a lock of its own and is woken by whoever brings what it waits for: a round
    trip between two threads is a matter of microseconds.
    """

    def __init__(
        self, actors: int, joined: int, staleness: int, ordered: bool, groups: int = 1
    ) -> None:
        """`groups`: of neighbouring actors, each of which gives an equal part of every update."""
        self.dropped = 0
        """Parcels that came too late to be learned from."""
        self.depth = 0
        """Parcels that lay there when the learner last took some."""
        self._joined, self._staleness, self._ordered = joined, staleness, ordered
        self._first = self._latest = 0
        self._weights: dict[int, Values] = {}
        self._sent: dict[int, float] = {}
        self._queues: list[deque[Parcel]] = [deque() for _ in range(actors)]
        self._arrived: list[Parcel] = []
        self._groups, self._members = groups, actors // groups
        self._each = joined // groups
        self._outstanding, self._learning = [0] * groups, 0
        self._most = self._each * (staleness + 1)
        self._mutex = threading.Lock()
        self._asleep: list[list[Watch]] = [[], [], []]
        self._closed = False

    def begin_at(self, version: int) -> None:
        """The version of the first weights; before anything is put."""
        self._first = self._latest = version

    def put_weights(self, version: int, values: Values) -> None:
        """The learner's weights after `version` updates."""
        with self._mutex:
            self._weights[version] = values
            self._sent[version] = time.perf_counter()
            self._latest = version
            self._weights.pop(version - self._staleness - 1, None)
            self._sent.pop(version - self._staleness - 1, None)
            self._outstanding = [begun - self._learning for begun in self._outstanding]
            self._learning = 0
            asleep = self._woken(LEAVE)
        _wake(asleep)

    def take_weights(self, turn: int, watch: Watch, copy: int = 0) -> tuple[int, Values]:
        """(version, weights) for an actor's unroll number `turn`; waits until it may begin."""
        group = copy // self._members
        with self._mutex:
            if self._ordered:
                wanted = max(self._first, turn - self._staleness)
                while wanted not in self._weights:
                    self._sleep(watch, LEAVE, "weights")
                return wanted, self._weights[wanted]
            while not self._weights or self._outstanding[group] >= self._most:
                self._sleep(watch, LEAVE, ENOUGH)
            self._outstanding[group] += 1
            return self._latest, self._weights[self._latest]

    def sent_at(self, version: int) -> float | None:
        """When weights were put; None if they are gone by now."""
        return self._sent.get(version)

    def abandon(self, copy: int = 0) -> None:
        """An unroll that an actor has begun will not come."""
        with self._mutex:
            self._outstanding[copy // self._members] -= 1
            asleep = self._woken(LEAVE)
        _wake(asleep)

    def put(self, parcel: Parcel, watch: Watch) -> None:
        """An actor's results; ordered, it waits while as many are queued as may be."""
        with self._mutex:
            if self._ordered:
                queue = self._queues[parcel.copy]
                while len(queue) > self._staleness:
                    self._sleep(watch, ROOM, ENOUGH)
                queue.append(parcel)
            else:
                self._arrived.append(parcel)
            parcel.sent = time.perf_counter()
            asleep = self._woken(RESULTS)
        _wake(asleep)

    def take(self, turn: int, watch: Watch) -> list[Parcel]:
        """The parcels of the learner's update number `turn`."""
        with self._mutex:
            if self._ordered:
                while not all(self._queues):
                    self._sleep(watch, RESULTS, "unrolls of every actor")
                self.depth = sum(map(len, self._queues))
                taken = [queue.popleft() for queue in self._queues]
            else:
                while any(len(group) < self._each for group in self._fresh(turn)):
                    self._sleep(watch, RESULTS, "unrolls")
                self._learning, self.depth = self._each, len(self._arrived)
                taken = [parcel for group in self._fresh(turn) for parcel in group[: self._each]]
                chosen = set(map(id, taken))
                self._arrived = [p for p in self._arrived if id(p) not in chosen]
            asleep = self._woken(ROOM)
        _wake(asleep)
        return taken

    def close(self) -> None:
        """Wakes everyone who waits; they get `Closed`."""
        with self._mutex:
            self._closed = True
            asleep = [watch for want in (LEAVE, ROOM, RESULTS) for watch in self._woken(want)]
        _wake(asleep)

    def _fresh(self, turn: int) -> list[list[Parcel]]:
        """What has arrived, by group and the oldest first; what is too old by now is dropped, and
        counted."""
        late = [p for p in self._arrived if turn - p.version > self._staleness]
        if late:
            self._arrived = [p for p in self._arrived if turn - p.version <= self._staleness]
            self.dropped += len(late)
            for parcel in late:
                self._outstanding[parcel.copy // self._members] -= 1
            for release in (release for parcel in late for release in parcel.releases):
                release()
            _wake(self._woken(LEAVE))
        oldest = sorted(self._arrived, key=lambda parcel: parcel.version)
        if self._groups == 1:
            return [oldest]
        return [
            [p for p in oldest if p.copy // self._members == group] for group in range(self._groups)
        ]

    def _sleep(self, watch: Watch, want: int, what: str) -> None:
        """Lets go of the mutex until there is more of what is wanted."""
        if self._closed:
            raise Closed(what)
        self._asleep[want].append(watch)
        self._mutex.release()
        try:
            watch.sleep(what)
        finally:
            self._mutex.acquire()
        if self._closed:
            raise Closed(what)

    def _woken(self, want: int) -> list[Watch]:
        asleep, self._asleep[want] = self._asleep[want], []
        return asleep


def _wake(asleep: list[Watch]) -> None:
    for watch in asleep:
        watch.wake()


def parts_of(parcels: list[Parcel], turn: int) -> list[Part]:
    """Who made each parcel that update number `turn` took."""
    return [Part(parcel.copy, parcel.turn, turn - parcel.version) for parcel in parcels]
