"""Channels of copies that act at their own pace: an update takes the unrolls that have arrived.

Staleness is kept by not letting a copy begin an unroll that would be too old when it is learned
from. One that is too old all the same, because its copy was slow, is dropped and counted. Which
unrolls belong to an update is decided once, for everyone who takes from them: the learner, and the
tables that they are inserted into.
"""

import time

from dovetail.runtime.channel import ENOUGH, ChannelEdge, Message, Ticket, Turn, Waiters
from dovetail.runtime.heartbeat import Watch


class Arrivals:
    """`copies` that act, of which each update takes `joined` unrolls."""

    def __init__(self, copies: int, joined: int, staleness: int, groups: int = 1) -> None:
        """`groups`: of neighboring copies, each of which gives an equal part of every update."""
        self.dropped = 0
        """Unrolls that came too late to be learned from."""
        self.sleepers = Waiters()
        self._staleness, self._groups = staleness, groups
        self._members, self._each = copies // groups, joined // groups
        self._weights: dict[int, dict[int, Message]] = {}
        """By version and the number of the channel."""
        self._latest: int | None = None
        self._arrived: list[Ticket] = []
        self._chosen: dict[int, list[Ticket]] = {}
        """By turn, the unrolls that its update takes."""
        self._outstanding = [0] * groups
        self._most = self._each * (staleness + 1)
        self._finished: dict[int, int] = {}
        """By turn, how many of those who take are done with it."""
        self.channels = 0
        """Channels out of the copies."""
        self.takers = 0
        """Copies of other sides that take over these channels, counted for each channel."""

    def group_of(self, copy: int) -> int:
        """The group that a copy is in."""
        return copy // self._members

    def put_weights(self, number: int, message: Message, last: bool) -> None:
        """Weights after so many updates, on channel `number`; with the `last` they are complete."""
        with self.sleepers.mutex:
            version = message.version
            message.sent = time.perf_counter()
            self._weights.setdefault(version, {})[number] = message
            if not last:
                return
            if self._latest is not None and version - 1 in self._chosen:
                self._outstanding = [begun - self._each for begun in self._outstanding]
            self._latest = version
            for old in [v for v in self._weights if v < version - self._staleness]:
                del self._weights[old]
            self.sleepers.wake()

    def admit(self, turn: Turn, copy: int, watch: Watch) -> None:
        """Lets a copy begin an unroll with the latest weights; waits until it may."""
        group = self.group_of(copy)
        with self.sleepers.mutex:
            while self._latest is None or self._outstanding[group] >= self._most:
                self.sleepers.sleep(watch, ENOUGH if self._latest is not None else "weights")
            self._outstanding[group] += 1
            turn.version = self._latest
        turn.ticket = Ticket(copy, turn.number, turn.version)
        turn.undo.append(lambda: self._abandon(group))

    def weights(self, turn: Turn, number: int) -> Message:
        """What a copy that was admitted takes over channel `number`."""
        with self.sleepers.mutex:
            return self._weights[turn.version][number]

    def _abandon(self, group: int) -> None:
        """An unroll that was begun will not come."""
        with self.sleepers.mutex:
            self._outstanding[group] -= 1
            self.sleepers.wake()

    def arrive(self, ticket: Ticket) -> None:
        """An unroll, complete."""
        with self.sleepers.mutex:
            self._arrived.append(ticket)
            self.sleepers.wake()

    def take(self, turn: int, watch: Watch) -> list[Ticket]:
        """The unrolls of update number `turn`, group by group; waits for them."""
        with self.sleepers.mutex:
            while turn not in self._chosen:
                fresh = self._fresh(turn)
                if all(len(group) >= self._each for group in fresh):
                    chosen = [ticket for group in fresh for ticket in group[: self._each]]
                    self._arrived = [t for t in self._arrived if t not in chosen]
                    self._chosen[turn] = chosen
                    self.sleepers.wake()
                else:
                    self.sleepers.sleep(watch, "unrolls")
            return self._chosen[turn]

    def depth(self) -> int:
        """Unrolls that lie there."""
        return len(self._arrived)

    def finish(self, turn: int) -> None:
        """One of those who take is done with a turn."""
        with self.sleepers.mutex:
            done = self._finished.get(turn, 0) + 1
            self._finished[turn] = done
            if done < self.takers:
                return
            del self._finished[turn]
            # the weights that came of it settle the account, in `put_weights`
            for old in [t for t in self._chosen if t < turn]:
                del self._chosen[old]

    def close(self) -> None:
        """Wakes everyone who waits."""
        self.sleepers.close()

    def _fresh(self, turn: int) -> list[list[Ticket]]:
        """What has arrived, by group and the oldest first, without what is too old by now."""
        late = [t for t in self._arrived if turn - t.version > self._staleness]
        if late:
            self._arrived = [t for t in self._arrived if turn - t.version <= self._staleness]
            self.dropped += len(late)
            for ticket in late:
                self._outstanding[self.group_of(ticket.copy)] -= 1
                for message in ticket.messages.values():
                    if message.lease is not None:
                        message.lease.done()
            self.sleepers.wake()
        oldest = sorted(self._arrived, key=lambda ticket: ticket.version)
        return [
            [t for t in oldest if self.group_of(t.copy) == group] for group in range(self._groups)
        ]


class Weights:
    """The channel by which copies that act get the latest weights."""

    def __init__(self, edge: ChannelEdge, arrivals: Arrivals, number: int, last: bool) -> None:
        self.edge, self._arrivals = edge, arrivals
        self._number, self._last = number, last

    def begin_at(self, turn: int) -> None:
        """Weights say their version themselves."""

    def put(self, turn: Turn, message: Message, watch: Watch) -> None:
        """Never waits."""
        self._arrivals.put_weights(self._number, message, self._last)

    def take(self, turn: Turn, taker: int, watch: Watch) -> list[Message]:
        """The latest; the first channel of a turn waits until an unroll may begin."""
        if turn.ticket is None:
            self._arrivals.admit(turn, taker, watch)
        return [self._arrivals.weights(turn, self._number)]

    def finish(self, turn: int, taker: int) -> None:
        """Weights are forgotten by their age."""

    def close(self) -> None:
        """Wakes everyone who waits."""
        self._arrivals.close()


class Arriving:
    """A channel out of copies that act; with the `last` of them an unroll is complete."""

    def __init__(self, edge: ChannelEdge, arrivals: Arrivals, number: int, last: bool) -> None:
        self.edge, self._arrivals = edge, arrivals
        self._number, self._last = number, last
        arrivals.takers += edge.takers

    def begin_at(self, turn: int) -> None:
        """An unroll says its version itself."""

    def put(self, turn: Turn, message: Message, watch: Watch) -> None:
        """Never waits: who acts was admitted before."""
        assert turn.ticket is not None
        message.sent = time.perf_counter()
        turn.ticket.messages[self._number] = message
        if self._last:
            turn.undo.clear()
            self._arrivals.arrive(turn.ticket)

    def take(self, turn: Turn, taker: int, watch: Watch) -> list[Message]:
        """Those of the update's unrolls that are a copy's."""
        tickets = self._arrivals.take(turn.number, watch)
        return [tickets[i].messages[self._number] for i in self.edge.senders_of(taker)]

    def finish(self, turn: int, taker: int) -> None:
        """When all who take are done, the turn's unrolls are forgotten."""
        self._arrivals.finish(turn)

    def close(self) -> None:
        """Wakes everyone who waits."""
        self._arrivals.close()
