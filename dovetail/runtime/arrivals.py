"""Channels of asynchronous actors: an update takes the unrolls that have arrived.

The staleness bound is enforced by admission: an actor may not begin an unroll that would be too old
by the time it is used. If an unroll is too old anyway because its actor was slow, it is dropped and
counted. The unrolls of an update are chosen once for all receivers: the learner, and the tables
they are inserted into.
"""

import time

from dovetail.runtime.channel import ENOUGH, ChannelEdge, Message, Ticket, Turn, Waiters
from dovetail.runtime.heartbeat import Watch


class Arrivals:
    """Shared state of the channels between `copies` actors and the learner.

    Each update takes `joined` unrolls.
    """

    def __init__(self, copies: int, joined: int, staleness: int, groups: int = 1) -> None:
        """Copies form `groups` of neighbors, each of which contributes equally to every update."""
        self.dropped = 0
        """Number of unrolls dropped because they exceeded the staleness bound."""
        self.sleepers = Waiters()
        self._staleness, self._groups = staleness, groups
        self._members, self._each = copies // groups, joined // groups
        self._weights: dict[int, dict[int, Message]] = {}
        """Version → channel number → message."""
        self._latest: int | None = None
        self._arrived: list[Ticket] = []
        self._chosen: dict[int, list[Ticket]] = {}
        """Turn → the unrolls of its update."""
        self._outstanding = [0] * groups
        # An unroll begun at version v is used within `staleness` updates if at most `staleness + 1`
        # updates' worth of unrolls are begun and not yet used.
        self._most = self._each * (staleness + 1)
        self._finished: dict[int, int] = {}
        """Turn → number of receivers that are done with it."""
        self.channels = 0
        """Number of channels out of the copies."""
        self.takers = 0
        """Number of receiving copies, summed over these channels."""

    def group_of(self, copy: int) -> int:
        """The group of a copy."""
        return copy // self._members

    def put_weights(self, number: int, message: Message, last: bool) -> None:
        """Publishes the weights on channel `number`; the `last` channel completes a version."""
        with self.sleepers.mutex:
            version = message.version
            message.sent = time.perf_counter()
            self._weights.setdefault(version, {})[number] = message
            if not last:
                return
            # These weights are the result of update `version - 1`, so its unrolls are used up.
            # The first weights of a run are nobody's result.
            if self._latest is not None and version - 1 in self._chosen:
                self._outstanding = [begun - self._each for begun in self._outstanding]
            self._latest = version
            # An unroll begun with older weights would be dropped on arrival.
            for old in [v for v in self._weights if v < version - self._staleness]:
                del self._weights[old]
            self.sleepers.wake()

    def admit(self, turn: Turn, copy: int, watch: Watch) -> None:
        """Waits until a copy may begin an unroll, then assigns it the latest version.

        Called in the thread of the acting worker, at its first take of a turn.
        """
        group = self.group_of(copy)
        with self.sleepers.mutex:
            while self._latest is None or self._outstanding[group] >= self._most:
                self.sleepers.sleep(watch, ENOUGH if self._latest is not None else "weights")
            # Counted and versioned under one lock, else another update could come between the two.
            self._outstanding[group] += 1
            turn.version = self._latest
            # Held by the ticket: a copy that is slow to take its weights must still find them.
            weights = self._weights[turn.version]
        turn.ticket = Ticket(copy, turn.number, turn.version, weights)
        turn.undo.append(lambda: self._abandon(group))

    def _abandon(self, group: int) -> None:
        """Cancels an unroll that was begun and failed."""
        with self.sleepers.mutex:
            self._outstanding[group] -= 1
            self.sleepers.wake()

    def arrive(self, ticket: Ticket) -> None:
        """Adds a complete unroll."""
        with self.sleepers.mutex:
            self._arrived.append(ticket)
            self.sleepers.wake()

    def take(self, turn: int, watch: Watch) -> list[Ticket]:
        """Waits for the unrolls of update `turn`, ordered by group; the same for all receivers."""
        with self.sleepers.mutex:
            while turn not in self._chosen:
                fresh = self._fresh(turn)
                if all(len(group) >= self._each for group in fresh):
                    # The first receiver to get here chooses for all.
                    chosen = [ticket for group in fresh for ticket in group[: self._each]]
                    self._arrived = [t for t in self._arrived if t not in chosen]
                    self._chosen[turn] = chosen
                    self.sleepers.wake()
                else:
                    self.sleepers.sleep(watch, "unrolls")
            return self._chosen[turn]

    def depth(self) -> int:
        """Number of unrolls waiting to be used."""
        return len(self._arrived)

    def finish(self, turn: int) -> None:
        """Called by each receiver when it is done with a turn."""
        with self.sleepers.mutex:
            done = self._finished.get(turn, 0) + 1
            self._finished[turn] = done
            if done < self.takers:
                return
            del self._finished[turn]
            # `_outstanding` is decremented in `put_weights`, when the resulting weights arrive.
            # The turn itself stays until the next: `put_weights` looks for it when the weights
            # come.
            for old in [t for t in self._chosen if t < turn]:
                del self._chosen[old]

    def close(self) -> None:
        """Wakes all waiting workers, which raise `Closed`."""
        self.sleepers.close()

    def _fresh(self, turn: int) -> list[list[Ticket]]:
        """The arrived unrolls by group, oldest first; drops those that are too old."""
        late = [t for t in self._arrived if turn - t.version > self._staleness]
        if late:
            self._arrived = [t for t in self._arrived if turn - t.version <= self._staleness]
            self.dropped += len(late)
            for ticket in late:
                self._outstanding[self.group_of(ticket.copy)] -= 1
                # Release the buffers of a dropped unroll, or its actor would never reuse them.
                for message in ticket.messages.values():
                    if message.lease is not None:
                        message.lease.done()
            self.sleepers.wake()
        # Oldest first, so that fewer unrolls grow too old.
        oldest = sorted(self._arrived, key=lambda ticket: ticket.version)
        return [
            [t for t in oldest if self.group_of(t.copy) == group] for group in range(self._groups)
        ]


class Weights:
    """A channel that gives acting copies the latest weights."""

    def __init__(self, edge: ChannelEdge, arrivals: Arrivals, number: int, last: bool) -> None:
        self.edge, self._arrivals = edge, arrivals
        self._number, self._last = number, last

    def begin_at(self, turn: int) -> None:
        """Does nothing: weights carry their version."""

    def put(self, turn: Turn, message: Message, watch: Watch) -> None:
        """Publishes weights without blocking."""
        self._arrivals.put_weights(self._number, message, self._last)

    def take(self, turn: Turn, taker: int, watch: Watch) -> list[Message]:
        """The latest weights; the first take of a turn waits for admission."""
        if turn.ticket is None:
            self._arrivals.admit(turn, taker, watch)
        assert turn.ticket is not None
        return [turn.ticket.weights[self._number]]

    def finish(self, turn: int, taker: int) -> None:
        """Does nothing: weights are dropped by age."""

    def close(self) -> None:
        """Wakes all waiting workers, which raise `Closed`."""
        self._arrivals.close()


class Arriving:
    """A channel out of acting copies; a put on the `last` such channel completes an unroll."""

    def __init__(self, edge: ChannelEdge, arrivals: Arrivals, number: int, last: bool) -> None:
        self.edge, self._arrivals = edge, arrivals
        self._number, self._last = number, last
        arrivals.takers += edge.takers

    def begin_at(self, turn: int) -> None:
        """Does nothing: unrolls carry their version."""

    def put(self, turn: Turn, message: Message, watch: Watch) -> None:
        """Adds a message to the unroll without blocking: admission has already limited it."""
        assert turn.ticket is not None
        message.sent = time.perf_counter()
        turn.ticket.messages[self._number] = message
        if self._last:
            # From here on the unroll counts as arrived, so a failure must not cancel it.
            turn.undo.clear()
            self._arrivals.arrive(turn.ticket)

    def take(self, turn: Turn, taker: int, watch: Watch) -> list[Message]:
        """The messages of the update's unrolls for one receiving copy."""
        tickets = self._arrivals.take(turn.number, watch)
        return [tickets[i].messages[self._number] for i in self.edge.senders_of(taker)]

    def finish(self, turn: int, taker: int) -> None:
        """Drops the unrolls of a turn when all receivers are done."""
        self._arrivals.finish(turn)

    def close(self) -> None:
        """Wakes all waiting workers, which raise `Closed`."""
        self._arrivals.close()
