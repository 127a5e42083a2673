"""The one loop that runs any fragment instance: take, run, put.

The schedule of a worker is derived from the plan: for each of its nodes, in graph order, the
channels to take from before and to put to after. `held` contains the state of its sides between
iterations. Nothing here depends on the strategy or on the meaning of a side.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax

from dovetail.boundaries import Side
from dovetail.graph.ir import Slots
from dovetail.runtime.arrays import Input, Key, Packed, Values, leaves_of, numbered
from dovetail.runtime.channel import ENOUGH, REPORT, Channel, Lease, Message, Turn
from dovetail.runtime.heartbeat import Watch
from dovetail.runtime.packing import Bundle
from dovetail.runtime.programs import Program, PythonProgram
from dovetail.runtime.remote import Payload, RemoteChain, RemoteWorker, RemoteWorkers
from dovetail.runtime.wire import KeyWords
from dovetail.telemetry.spans import COMPUTE, LINK, QUEUE, ROOM, WAIT, Track


@dataclass(frozen=True)
class Take:
    """Takes the inputs of a node from a channel."""

    channel: Channel
    taker: int
    """The index of the receiving copy."""
    weights: bool = False
    """Whether the message sets the version of the whole turn."""
    arrives: bool = False
    """Whether the messages come from acting copies, so that their staleness is recorded."""
    report: bool = False
    """Whether the messages are reports on environments, which no program takes."""


@dataclass(frozen=True)
class RunProgram:
    """Runs a program."""

    program: Program | None
    """None if it runs in another process: a chain of that process then takes its place."""
    noted: bool = False
    """Whether the program records its own spans."""


@dataclass(frozen=True)
class Put:
    """Sends the outputs of a node to a channel."""

    channel: Channel
    sender: int
    """The index of the sending copy."""
    here: bool = True
    """Whether a worker of this process takes them."""
    away: bool = False
    """Whether a worker of another process takes them."""


Operation = Take | RunProgram | Put


@dataclass(frozen=True)
class ProgramChain:
    """Consecutive programs of a worker in another process, run with one call."""

    program: RemoteChain
    puts: tuple[Put, ...]
    """The puts that follow it."""


class RunningWorker:
    """Hosts fragment instances and runs them once per turn.

    `turn` and `end` run in the worker's thread; other threads may call `ended`.
    """

    def __init__(
        self,
        name: str,
        copies: dict[Side, int],
        slots: list[Slots[object]],
        host: RemoteWorkers | None = None,
        away: RemoteWorker | None = None,
    ) -> None:
        self.name = name
        self.copies = copies
        """The sides it hosts, each with the index of its copy."""
        self.host = host
        """Connects to the workers of other processes, if there are any."""
        self.away = away
        """Its other half, if its programs run in another process: here it only takes and puts."""
        self.watch = Watch(name)
        self.track = Track(name)
        self.held: Values = {}
        self.seconds: dict[str, float] = {}
        self.schedule: list[Operation | ProgramChain] = []
        """The operations of one turn."""
        self.bundles: list[Bundle] = []
        """Parts of the state that it holds as one array each."""
        self._slots = slots
        self._finished = -1
        self._over = threading.Condition()
        self._unpacking: dict[Packed, Callable[[Input], list[jax.Array]]] = {}

    def turn(self, number: int) -> tuple[Values, Turn]:
        """Runs one iteration; `held` changes only if all of it succeeds, so it can be retried.

        Returns the values of the iteration and its turn, which `end` must get. Raises the error of
        a program, or `Closed` when the run ends.
        """
        # A shallow copy: if the turn fails, `held` is as before.
        values, turn = dict(self.held), Turn(number, number)
        payloads: list[Payload] = []
        try:
            for operation in self.schedule:
                if isinstance(operation, Take):
                    self._take(operation, values, turn, payloads)
                elif isinstance(operation, Put):
                    self._put(operation, values, turn)
                elif isinstance(operation, RunProgram):
                    self.run(operation, values, turn)
                else:
                    self._run_away(operation, turn, payloads)
        except BaseException:
            for undo in turn.undo:
                undo()
            raise
        if self.away is None:
            # All at once and last: until here a failure leaves `held` as it was.
            self.held = self.kept(values)
        self.watch.warm = True
        self.watch.idle()
        return values, turn

    def end(self, turn: Turn) -> None:
        """Finishes a turn: its messages and buffers may be reused.

        After it, nothing may read the arrays that the turn took or made in buffers.
        """
        for operation in self.schedule:
            if isinstance(operation, Take):
                operation.channel.finish(turn.number, operation.taker)
        for message in turn.taken:
            if message.lease is not None:
                message.lease.done()
        if turn.lease is not None:
            turn.lease.done()
        else:
            for release in turn.releases:
                release()
        with self._over:
            self._finished = turn.number
            self._over.notify_all()

    def ended(self, turn: int, limit: float) -> bool:
        """Waits until a turn is finished; False after `limit` seconds."""
        with self._over:
            return self._over.wait_for(lambda: self._finished >= turn, limit)

    def begin_at(self, turn: int) -> None:
        """Sets the number of the first turn."""
        self._finished = turn - 1

    def _take(self, operation: Take, values: Values, turn: Turn, payloads: list[Payload]) -> None:
        """Takes the messages of a channel, and records the time they lay there.

        Their values go into `values`, or as references into `payloads` if another process runs the
        programs.
        """
        channel, watch = operation.channel, self.watch
        name = channel.edge.boundary
        began, waited = time.perf_counter(), watch.waited
        messages = channel.take(turn, operation.taker, watch)
        self._note_wait(name, began, waited, turn.version)
        now = time.perf_counter()
        if operation.weights:
            turn.version = messages[0].version
        turn.taken += messages
        for message in () if operation.report else messages:
            lay = now - message.sent
            behind = turn.number - message.version if operation.arrives else -1
            items, version = len(messages), message.version
            # The time in the channel, from the sender's put to this take.
            self.track.add(QUEUE, name, message.sent, lay, 1, 0, items, version, behind)
        if operation.report:
            turn.reports += messages
        elif self.away is not None:
            payloads += [self._payload(message) for message in messages]
        else:
            sent = [self._values(message) for message in messages]
            values.update(channel.edge.combined(sent, operation.taker))

    def _values(self, message: Message) -> Values:
        """The values of a message, fetched if they are in another process."""
        if message.values is None:
            assert self.host is not None
            # Stored in the message: other receivers of this process need not fetch again.
            message.values = self.host.fetch(message.shared)
        return message.values

    def _payload(self, message: Message) -> Payload:
        """The reference to a message's values for another process."""
        if message.shared is None:
            assert self.host is not None and message.values is not None
            # One reference for all other processes that take this message.
            message.shared = self.host.share(message.values)
        return message.shared

    def _put(self, operation: Put, values: Values, turn: Turn) -> None:
        numbers = operation.channel.edge.numbers
        self._send(operation, turn, {number: values[number] for number in numbers}, None)

    def _send(
        self, operation: Put, turn: Turn, values: Values | None, payload: Payload | None
    ) -> None:
        """Puts one message on a channel and records the span."""
        channel, watch = operation.channel, self.watch
        edge = channel.edge
        # One reader more than there are receivers: the worker itself, until `end`.
        if turn.lease is None and turn.releases:
            turn.lease = Lease(1 + self._readers(), turn.releases)
        lease = turn.lease if edge.takers_of(operation.sender) else None
        began, waited = time.perf_counter(), watch.waited
        if operation.away and payload is None and values is not None:
            assert self.host is not None
            payload = self.host.share(values)
        message = Message(operation.sender, turn.number, turn.version, values, payload, lease)
        channel.put(turn, message, watch)
        self._note_wait(edge.boundary, began, waited, turn.version)
        if self.away is not None or edge.boundary == REPORT:  # recorded there; not an edge
            return
        # Time blocked on a full channel is a wait, not a transfer.
        at = began + watch.waited - waited
        spent = time.perf_counter() - at
        self.track.add(LINK, edge.boundary, at, spent, 1, size(values or {}), 1, turn.version)

    def _readers(self) -> int:
        """Number of receivers of this worker's messages in a turn, summed over channels."""
        return sum(
            operation.channel.edge.takers_of(operation.sender)
            for operation in self.schedule
            if isinstance(operation, Put)
        )

    def run(self, operation: RunProgram, values: Values, turn: Turn) -> None:
        """Runs a program on the values of a turn."""
        program = operation.program
        assert program is not None
        self.watch.doing(f"running {program.name}")
        began = time.perf_counter()
        release = program.run(values)
        if release is not None:
            turn.releases.append(release)
        spent = time.perf_counter() - began
        self.seconds[program.name] = self.seconds.get(program.name, 0.0) + spent
        if isinstance(program, PythonProgram) and program.moved is not None:
            self.track.add(LINK, program.name, began, spent, 1, program.moved, 1, turn.version)
        elif not operation.noted:
            self.track.add(COMPUTE, program.name, began, spent, version=turn.version)

    def _run_away(self, operation: ProgramChain, turn: Turn, payloads: list[Payload]) -> None:
        """Runs a chain in the worker's process and puts its results."""
        program, host = operation.program, self.host
        assert host is not None
        self.watch.doing(f"running {program.name}")
        began = time.perf_counter()
        made = program.run(payloads, self.watch.beat, self.track)
        payloads.clear()
        spent = time.perf_counter() - began
        self.seconds[program.name] = self.seconds.get(program.name, 0.0) + spent
        for put, payload in zip(operation.puts, made, strict=True):
            values = None if put.away else host.fetch(payload)
            self._send(put, turn, values, payload if put.away else None)

    def kept(self, values: Values) -> Values:
        """Selects the values that carry over to the next iteration, under their input numbers."""
        kept = {
            taken.id: values[made.id]
            for slots in self._slots
            for taken, made in zip(slots.inputs, slots.outputs, strict=True)
            if made.id in values
        }
        return kept | {b.key_taken: values[b.key_made] for b in self.bundles}

    def hold(self, state: Values) -> None:
        """Sets values of the state, packed into bundles where possible; changes `state`.

        Compiles the unpacking of each bundle.
        """
        for bundle in self.bundles:
            state[bundle.key_taken] = bundle.pack(leaves_of(state, bundle.taken))
            for value in bundle.taken:
                if value.id not in bundle.shared:
                    del state[value.id]
            self._unpack(bundle, state[bundle.key_taken])  # compile now, not during the run
        self.held |= state

    def _unpack(self, bundle: Bundle, array: Input) -> list[jax.Array]:
        """Unpacks a bundle with one compiled call."""
        if bundle.key_taken not in self._unpacking:
            self._unpacking[bundle.key_taken] = jax.jit(bundle.unpack)
        return self._unpacking[bundle.key_taken](array)

    def all_held(self) -> Values:
        """Everything it holds, with bundles unpacked."""
        found = dict(self.held)
        for bundle in self.bundles:
            leaves = self._unpack(bundle, self.held[bundle.key_taken])
            found |= numbered(bundle.taken, leaves)
        return found

    def apart(self, values: Values) -> Values:
        """The unpacked values of the bundles that an iteration produced."""
        found: Values = {}
        for bundle in self.bundles:
            leaves = self._unpack(bundle, values[bundle.key_made])
            found |= numbered(bundle.made, leaves)
        return found

    def _note_wait(self, what: str, began: float, before: float, version: int) -> None:
        waited = self.watch.waited - before
        if waited > 0:
            what = ROOM if self.watch.awaited == ENOUGH else what
            self.track.add(WAIT, what, began, waited, version=version)


def size(values: Mapping[Key, Input | KeyWords]) -> int:
    """Total bytes of the arrays; random keys count as nothing."""
    return sum(
        getattr(leaf, "nbytes", 0)
        for found in values.values()
        for leaf in (found if isinstance(found, list) else [found])
    )
