"""A channel carries one edge of the graph, straight between the instances that it joins.

Every worker counts its turns, one for each iteration, so a message is known by its turn and by the
copy that sent it. In lockstep a turn takes the messages of the same turn, or of one that is `lag`
turns older: a fixed staleness, or answers that were asked for ahead. A message stays until all that
take it have finished the turn they took it for: a worker that failed takes it again.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dovetail.boundaries import BATCH_AXIS, How
from dovetail.runtime.heartbeat import Watch
from dovetail.runtime.packing import Values

ENOUGH = "others, who have enough for now"
"""What a worker waits for that is ahead of those who take from it."""


REPORT = "report"
"""The boundary by which copies that act tell the home side of their state and of finished episodes,
at the end of a turn. No edge of the graph: spans leave it out."""


class Closed(Exception):
    """The run ends: nothing will come over this channel any more."""


class Lease:
    """Buffers that several workers read: they may be written again when the last is done."""

    def __init__(self, readers: int, releases: Sequence[Callable[[], None]]) -> None:
        self._left, self._releases = readers, releases
        self._lock = threading.Lock()

    def done(self) -> None:
        """One of the readers is done."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        for release in self._releases if last else ():
            release()


@dataclass
class Message:
    """What one copy of a side sends in one turn."""

    copy: int
    turn: int
    version: int
    """Of the weights that made it."""
    values: Values | None
    """By number; None where only `shared` stands for them."""
    shared: Any = None
    """What stands for the values in other processes."""
    lease: Lease | None = None
    sent: float = 0.0
    """When it was put on the channel."""


@dataclass
class Ticket:
    """All that an acting copy sends in one turn, where updates take what has arrived."""

    copy: int
    turn: int
    version: int
    messages: dict[int, Message] = field(default_factory=dict)
    """By the number of the channel."""


@dataclass
class Turn:
    """One iteration of one worker."""

    number: int
    version: int
    """Of the weights it works with."""
    releases: list[Callable[[], None]] = field(default_factory=list)
    """What to call when the arrays it made have been read."""
    lease: Lease | None = None
    ticket: Ticket | None = None
    taken: list[Message] = field(default_factory=list)
    reports: list[Message] = field(default_factory=list)
    """What copies that act told of the environments: of their state, and of finished episodes."""
    undo: list[Callable[[], None]] = field(default_factory=list)
    """What to call if the turn fails."""


@dataclass(frozen=True)
class ChannelEdge:
    """What a channel carries, and from how many copies to how many."""

    boundary: str
    numbers: tuple[int, ...]
    how: How
    senders: int
    takers: int

    def senders_of(self, taker: int) -> range:
        """The copies whose messages a copy takes."""
        if self.how is How.MEAN:
            return range(self.senders)
        if self.how is How.JOIN:
            first = taker * self.senders // self.takers
            return range(first, max(first + 1, (taker + 1) * self.senders // self.takers))
        return range(1)

    def takers_of(self, sender: int) -> int:
        """How many copies take a copy's message."""
        return sum(sender in self.senders_of(taker) for taker in range(self.takers))

    def part(self, taker: int) -> tuple[int, int]:
        """(which, of how many) equal parts of a message a copy takes."""
        if self.how is How.DIVIDE:
            return taker, self.takers
        if self.how is How.JOIN and self.takers > self.senders:
            parts = self.takers // self.senders
            return taker % parts, parts
        return 0, 1

    def combined(self, sent: Sequence[Values], taker: int) -> Values:
        """What a copy's programs take of some messages: a list where several sent."""
        which, parts = self.part(taker)
        found: Values = {}
        for number in self.numbers:
            pieces = [_part(values[number], which, parts) for values in sent]
            found[number] = pieces if len(pieces) > 1 else pieces[0]
        return found


def _part(leaf: Any, which: int, parts: int) -> Any:
    if parts == 1:
        return leaf
    each = leaf.shape[BATCH_AXIS] // parts
    return leaf[:, which * each : (which + 1) * each]


class Channel(Protocol):
    """What a worker puts to and takes from."""

    edge: ChannelEdge

    def begin_at(self, turn: int) -> None:
        """The number of the first turn; before anything is put."""
        ...

    def put(self, turn: Turn, message: Message, watch: Watch) -> None:
        """Sends a message; may wait while those who take have enough."""
        ...

    def take(self, turn: Turn, taker: int, watch: Watch) -> list[Message]:
        """The messages that a copy takes in a turn; waits for them."""
        ...

    def finish(self, turn: int, taker: int) -> None:
        """A copy is done with all that it took for a turn."""
        ...

    def close(self) -> None:
        """Wakes everyone who waits; they get `Closed`."""
        ...


class Waiters:
    """Workers that sleep until something changes, each on a lock of its own: a round trip between
    two threads is a matter of microseconds. Hold `mutex` for everything."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.closed = False
        self._asleep: list[Watch] = []

    def sleep(self, watch: Watch, what: str) -> None:
        """Lets go of the mutex until somebody calls `wake`."""
        if self.closed:
            raise Closed(what)
        self._asleep.append(watch)
        self.mutex.release()
        try:
            watch.sleep(what)
        finally:
            self.mutex.acquire()
        if self.closed:
            raise Closed(what)

    def wake(self) -> None:
        """Wakes everyone; they look again at what they wait for."""
        asleep, self._asleep = self._asleep, []
        for watch in asleep:
            watch.wake()

    def close(self) -> None:
        """Wakes everyone for good."""
        with self.mutex:
            self.closed = True
            self.wake()


class Lockstep:
    """A channel whose messages are taken turn by turn."""

    def __init__(self, edge: ChannelEdge, lag: int = 0, depth: int | None = None) -> None:
        """A turn takes what was sent `lag` turns before. With a `depth`, at most so many turns are
        put that are not finished."""
        self.edge, self._lag, self._depth = edge, lag, depth
        self._first = 0
        self._sent: dict[int, dict[int, Message]] = {}
        self._done = [0] * edge.takers
        """By taker, its next turn."""
        self._sleepers = Waiters()

    def begin_at(self, turn: int) -> None:
        """The number of the first turn."""
        self._first, self._done = turn, [turn] * self.edge.takers

    def put(self, turn: Turn, message: Message, watch: Watch) -> None:
        """Sends a message; one that was sent before a failure is replaced."""
        sleepers = self._sleepers
        with sleepers.mutex:
            while self._depth is not None and turn.number - min(self._done) >= self._depth:
                sleepers.sleep(watch, ENOUGH)
            message.sent = time.perf_counter()
            self._sent.setdefault(turn.number, {})[message.copy] = message
            sleepers.wake()

    def take(self, turn: Turn, taker: int, watch: Watch) -> list[Message]:
        """The messages of the turn, or of one before it."""
        wanted = max(self._first, turn.number - self._lag)
        senders, sleepers = self.edge.senders_of(taker), self._sleepers
        with sleepers.mutex:
            while any(copy not in self._sent.get(wanted, ()) for copy in senders):
                sleepers.sleep(watch, self.edge.boundary)
            return [self._sent[wanted][copy] for copy in senders]

    def finish(self, turn: int, taker: int) -> None:
        """Forgets what nobody will take again."""
        with self._sleepers.mutex:
            self._done[taker] = turn + 1
            wanted = max(self._first, min(self._done) - self._lag)
            for old in [number for number in self._sent if number < wanted]:
                del self._sent[old]
            if self._depth is not None:
                self._sleepers.wake()

    def close(self) -> None:
        """Wakes everyone who waits."""
        self._sleepers.close()
