"""A channel carries one edge of the graph directly between the instances at its ends.

Every worker numbers its turns, one per iteration, so the turn and the sending copy identify a
message. In lockstep, a turn takes the messages of the same turn or of the turn `lag` before it: a
fixed staleness, or samples prefetched from a replay. A message stays until all its receivers have
finished the turn they took it for, so a worker that failed can take it again.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dovetail.boundaries import BATCH_AXIS, How
from dovetail.runtime.arrays import Input, Leaf, Values
from dovetail.runtime.heartbeat import Watch

ENOUGH = "others, who have enough for now"
"""Shown while a worker is blocked because it is ahead of its receivers."""


REPORT = "report"
"""The channel on which acting copies report their state and finished episodes to the home side at
the end of a turn. It is not an edge of the graph, so it has no spans."""


class Closed(Exception):
    """The run is ending and the channel is closed."""


class Lease:
    """Reference count of buffers with several readers: the last one releases them for reuse."""

    def __init__(self, readers: int, releases: Sequence[Callable[[], None]]) -> None:
        self._left, self._releases = readers, releases
        self._lock = threading.Lock()

    def done(self) -> None:
        """Called once by each reader, from any thread."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        # Outside the lock, which only guards the count.
        for release in self._releases if last else ():
            release()


@dataclass
class Message:
    """The values that one copy of a side sends in one turn.

    A receiver fetches missing `values`, or shares them, and stores the result for the others.
    """

    copy: int
    turn: int
    version: int
    """The version of the weights that produced it."""
    values: Values | None
    """By value number; None if only `shared` refers to them."""
    shared: object = None
    """A reference to the values for other processes, which only a host can read."""
    lease: Lease | None = None
    sent: float = 0.0
    """When it was put on the channel, in `time.perf_counter` seconds."""


@dataclass
class Ticket:
    """All messages of an acting copy in one turn, for updates that take unrolls as they arrive."""

    copy: int
    turn: int
    version: int
    weights: Mapping[int, Message]
    """The weights it acts with, by channel number."""
    messages: dict[int, Message] = field(default_factory=dict)
    """By channel number."""


@dataclass
class Turn:
    """One iteration of one worker."""

    number: int
    version: int
    """The version of the weights in use."""
    releases: list[Callable[[], None]] = field(default_factory=list)
    """Called when all readers are done with the arrays of this turn."""
    lease: Lease | None = None
    ticket: Ticket | None = None
    taken: list[Message] = field(default_factory=list)
    reports: list[Message] = field(default_factory=list)
    """Messages of acting copies on their state and finished episodes."""
    undo: list[Callable[[], None]] = field(default_factory=list)
    """Called if the turn fails."""


@dataclass(frozen=True)
class ChannelEdge:
    """The values on a channel, and the number of copies at its ends."""

    boundary: str
    numbers: tuple[int, ...]
    how: How
    senders: int
    takers: int

    def senders_of(self, taker: int) -> range:
        """The copies from which a receiving copy takes messages."""
        if self.how is How.MEAN:
            return range(self.senders)
        if self.how is How.JOIN:
            first = taker * self.senders // self.takers
            # With more takers than senders, neighbors share a sender, and `part` splits its
            # message.
            return range(first, max(first + 1, (taker + 1) * self.senders // self.takers))
        return range(1)

    def takers_of(self, sender: int) -> int:
        """Number of copies that take a sending copy's message."""
        return sum(sender in self.senders_of(taker) for taker in range(self.takers))

    def part(self, taker: int) -> tuple[int, int]:
        """The part of a message that a copy takes, as (index, number of equal parts)."""
        if self.how is How.DIVIDE:
            return taker, self.takers
        if self.how is How.JOIN and self.takers > self.senders:
            parts = self.takers // self.senders
            return taker % parts, parts
        return 0, 1

    def combined(self, sent: Sequence[Values], taker: int) -> Values:
        """The program inputs from the messages in `sent`: a list per value if there are several.

        With `DIVIDE`, or with more takers than senders, the part of copy `taker` along the batch
        axis.
        """
        which, parts = self.part(taker)
        found: Values = {}
        for number in self.numbers:
            pieces = [_part(_whole(values[number]), which, parts) for values in sent]
            found[number] = pieces if len(pieces) > 1 else pieces[0]
        return found


def _whole(sent: Input) -> Leaf:
    assert not isinstance(sent, list)  # pieces are made here, from whole arrays
    return sent


def _part(leaf: Leaf, which: int, parts: int) -> Leaf:
    if parts == 1:
        return leaf
    each = leaf.shape[BATCH_AXIS] // parts
    return leaf[:, which * each : (which + 1) * each]


class Channel(Protocol):
    """The interface that workers put to and take from, each in its own thread."""

    edge: ChannelEdge

    def begin_at(self, turn: int) -> None:
        """Sets the number of the first turn, before anything is put."""
        ...

    def put(self, turn: Turn, message: Message, watch: Watch) -> None:
        """Sends a message; may block while the receivers are too far behind.

        Called in the sender's thread. Time spent blocked is added to `watch.waited`. Raises
        `Closed` when the run ends.
        """
        ...

    def take(self, turn: Turn, taker: int, watch: Watch) -> list[Message]:
        """Waits for and returns the messages of a copy in a turn, one from each sending copy.

        Called in the receiver's thread; raises `Closed` when the run ends.
        """
        ...

    def finish(self, turn: int, taker: int) -> None:
        """Marks all messages that a copy took for a turn as done."""
        ...

    def close(self) -> None:
        """Wakes all waiting workers, which raise `Closed`."""
        ...


class Waiters:
    """Workers waiting for a change; call `sleep` and `wake` with `mutex` held.

    Each worker sleeps on its own lock, which makes a round trip between two threads take
    microseconds. (`threading.Condition` allocates a lock for every wait.)
    """

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.closed = False
        self._asleep: list[Watch] = []

    def sleep(self, watch: Watch, what: str) -> None:
        """Releases the mutex until `wake`; raises `Closed` when the run ends."""
        if self.closed:
            raise Closed(what)
        # Registered before the mutex is released, so no `wake` in between is lost.
        self._asleep.append(watch)
        self.mutex.release()
        try:
            watch.sleep(what)
        finally:
            self.mutex.acquire()
        if self.closed:
            raise Closed(what)

    def wake(self) -> None:
        """Wakes all workers, which then check their condition again."""
        asleep, self._asleep = self._asleep, []
        for watch in asleep:
            watch.wake()

    def close(self) -> None:
        """Wakes all workers with `Closed`; takes the mutex itself."""
        with self.mutex:
            self.closed = True
            self.wake()


class Lockstep:
    """A channel whose messages are taken in turn order."""

    def __init__(self, edge: ChannelEdge, lag: int = 0, depth: int | None = None) -> None:
        """A turn takes the messages sent `lag` turns before. With a `depth`, senders block when
        that many turns are unfinished."""
        self.edge, self._lag, self._depth = edge, lag, depth
        self._first = 0
        self._sent: dict[int, dict[int, Message]] = {}
        self._done = [0] * edge.takers
        """For each receiver, its next turn."""
        self._sleepers = Waiters()

    def begin_at(self, turn: int) -> None:
        """Sets the number of the first turn."""
        self._first, self._done = turn, [turn] * self.edge.takers

    def put(self, turn: Turn, message: Message, watch: Watch) -> None:
        """Sends a message, replacing one that was sent before a failure."""
        sleepers = self._sleepers
        with sleepers.mutex:
            while self._depth is not None and turn.number - min(self._done) >= self._depth:
                sleepers.sleep(watch, ENOUGH)
            message.sent = time.perf_counter()
            # A worker that failed after this put runs its turn again, and puts the same message.
            self._sent.setdefault(turn.number, {})[message.copy] = message
            sleepers.wake()

    def take(self, turn: Turn, taker: int, watch: Watch) -> list[Message]:
        """The messages of `lag` turns before; of the first turn, if that is later."""
        # The first `lag` turns have no older messages, so they all take those of the first turn.
        wanted = max(self._first, turn.number - self._lag)
        senders, sleepers = self.edge.senders_of(taker), self._sleepers
        with sleepers.mutex:
            # Wakes are not addressed: check the condition again after each.
            while any(copy not in self._sent.get(wanted, ()) for copy in senders):
                sleepers.sleep(watch, self.edge.boundary)
            return [self._sent[wanted][copy] for copy in senders]

    def finish(self, turn: int, taker: int) -> None:
        """Drops the messages that no receiver will take again.

        Called in the receiver's thread at the end of its turn. Until then a failed receiver can
        repeat the turn with the same messages.
        """
        with self._sleepers.mutex:
            self._done[taker] = turn + 1
            wanted = max(self._first, min(self._done) - self._lag)
            for old in [number for number in self._sent if number < wanted]:
                del self._sent[old]
            if self._depth is not None:
                self._sleepers.wake()

    def close(self) -> None:
        """Wakes all waiting workers, which raise `Closed`."""
        self._sleepers.close()
