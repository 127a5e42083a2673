"""The one loop that runs any fragment instance: take, run, put.

A worker's schedule is worked out from the plan: for each of its nodes, in the graph's order, what
to take before and what to put after. What its sides keep from one iteration to the next lies in
`held`. Nothing here knows which strategy made the plan, or what a side is for.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from dovetail.boundaries import Side
from dovetail.graph.ir import Slots
from dovetail.runtime.channel import ENOUGH, REPORT, Channel, Lease, Message, Turn
from dovetail.runtime.heartbeat import Watch
from dovetail.runtime.packing import Bundle, Key, Values
from dovetail.runtime.programs import PythonProgram
from dovetail.runtime.remote import Payload, RemoteChain, RemoteWorker, RemoteWorkers
from dovetail.telemetry.spans import COMPUTE, LINK, QUEUE, ROOM, WAIT, Track


@dataclass(frozen=True)
class Take:
    """Takes what a node needs from a channel."""

    channel: Channel
    taker: int
    """Which copy takes."""
    weights: bool = False
    """Whether the version of what it takes is that of all the worker does in the turn."""
    arrives: bool = False
    """Whether the messages come from copies that act: how old they are is noted."""
    report: bool = False
    """Whether the messages tell of environments, and no program takes them."""


@dataclass(frozen=True)
class RunProgram:
    """Runs a program."""

    program: Any
    noted: bool = False
    """Whether the program notes its spans by itself."""


@dataclass(frozen=True)
class Put:
    """Sends what a node made to a channel."""

    channel: Channel
    sender: int
    """Which copy sends."""
    here: bool = True
    """Whether anybody takes it in this process,"""
    away: bool = False
    """and in another."""


Operation = Take | RunProgram | Put


@dataclass(frozen=True)
class Chain:
    """Programs between two channels, on a worker in another process."""

    program: RemoteChain
    puts: tuple[Put, ...]
    """What follows it."""


class RunningWorker:
    """Hosts fragment instances and runs them round and round."""

    def __init__(
        self,
        name: str,
        copies: dict[Side, int],
        slots: list[Slots],
        host: RemoteWorkers | None = None,
        away: RemoteWorker | None = None,
    ) -> None:
        self.name = name
        self.copies = copies
        """The sides that it hosts, and which copy of each."""
        self.host = host
        """What reaches workers in other processes, if there are any."""
        self.away = away
        """The process where its programs run, if that is another: it only takes and puts here."""
        self.watch = Watch(name)
        self.track = Track(name)
        self.held: Values = {}
        self.seconds: dict[str, float] = {}
        self.schedule: list[Operation | Chain] = []
        """What it does in an iteration."""
        self.bundles: list[Bundle] = []
        """What it holds of the state as one array each."""
        self._slots = slots
        self._finished = -1
        self._over = threading.Condition()
        self._unpacking: dict[Key, Callable[[Any], list[Any]]] = {}

    def turn(self, number: int) -> tuple[Values, Turn]:
        """One iteration; what it keeps changes only when all of it has succeeded."""
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
            self.held = self.kept(values)
        self.watch.warm = True
        self.watch.idle()
        return values, turn

    def end(self, turn: Turn) -> None:
        """What a turn took and made may be written again."""
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
        """Waits until a turn is over; False if that takes longer than `limit` seconds."""
        with self._over:
            return self._over.wait_for(lambda: self._finished >= turn, limit)

    def begin_at(self, turn: int) -> None:
        """The number of the first turn; before any."""
        self._finished = turn - 1

    def _take(self, operation: Take, values: Values, turn: Turn, payloads: list[Payload]) -> None:
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
            self.track.add(QUEUE, name, message.sent, lay, 1, 0, items, version, behind)
        if operation.report:
            turn.reports += messages
        elif self.away is not None:
            payloads += [self._payload(message) for message in messages]
        else:
            sent = [self._values(message) for message in messages]
            values.update(channel.edge.combined(sent, operation.taker))

    def _values(self, message: Message) -> Values:
        """What a message holds, brought here if it lies elsewhere."""
        if message.values is None:
            assert self.host is not None
            message.values = self.host.fetch(message.shared)
        return message.values

    def _payload(self, message: Message) -> Payload:
        """What stands for a message in another process."""
        if message.shared is None:
            assert self.host is not None and message.values is not None
            message.shared = self.host.share(message.values)
        return message.shared

    def _put(self, operation: Put, values: Values, turn: Turn) -> None:
        numbers = operation.channel.edge.numbers
        self._send(operation, turn, {number: values[number] for number in numbers}, None)

    def _send(
        self, operation: Put, turn: Turn, values: Values | None, payload: Payload | None
    ) -> None:
        """Puts one message."""
        channel, watch = operation.channel, self.watch
        edge = channel.edge
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
        if self.away is not None or edge.boundary == REPORT:  # it was noted there; it is no edge
            return
        at = began + watch.waited - waited
        spent = time.perf_counter() - at
        self.track.add(LINK, edge.boundary, at, spent, 1, size(values or {}), 1, turn.version)

    def _readers(self) -> int:
        """How many take what this worker sends in a turn, counted for each channel."""
        return sum(
            operation.channel.edge.takers_of(operation.sender)
            for operation in self.schedule
            if isinstance(operation, Put)
        )

    def run(self, operation: RunProgram, values: Values, turn: Turn) -> None:
        """Runs a program on the values of a turn."""
        program = operation.program
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

    def _run_away(self, operation: Chain, turn: Turn, payloads: list[Payload]) -> None:
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
        """What goes into the next iteration, of what an iteration ended with."""
        kept = {
            taken.id: values[made.id]
            for slots in self._slots
            for taken, made in zip(slots.inputs, slots.outputs, strict=True)
            if made.id in values
        }
        return kept | {b.key_taken: values[b.key_made] for b in self.bundles}

    def hold(self, state: Values) -> None:
        """Holds values of the state, together where they go together."""
        for bundle in self.bundles:
            state[bundle.key_taken] = bundle.pack([state[v.id] for v in bundle.taken])
            for value in bundle.taken:
                if value.id not in bundle.shared:
                    del state[value.id]
            self._unpack(bundle, state[bundle.key_taken])  # compiled now, not while it runs
        self.held |= state

    def _unpack(self, bundle: Bundle, array: Any) -> list[Any]:
        """The values of a bundle, by one compiled call."""
        if bundle.key_taken not in self._unpacking:
            self._unpacking[bundle.key_taken] = jax.jit(bundle.unpack)
        return self._unpacking[bundle.key_taken](array)

    def all_held(self) -> Values:
        """What it holds, each by itself."""
        found = dict(self.held)
        for bundle in self.bundles:
            leaves = self._unpack(bundle, self.held[bundle.key_taken])
            found |= {value.id: leaf for value, leaf in zip(bundle.taken, leaves, strict=True)}
        return found

    def apart(self, values: Values) -> Values:
        """What an iteration made of what goes together, each by itself."""
        found: Values = {}
        for bundle in self.bundles:
            leaves = self._unpack(bundle, values[bundle.key_made])
            found |= {value.id: leaf for value, leaf in zip(bundle.made, leaves, strict=True)}
        return found

    def _note_wait(self, what: str, began: float, before: float, version: int) -> None:
        waited = self.watch.waited - before
        if waited > 0:
            what = ROOM if self.watch.awaited == ENOUGH else what
            self.track.add(WAIT, what, began, waited, version=version)


def size(values: Values) -> int:
    """Bytes of the arrays."""
    return sum(
        getattr(leaf, "nbytes", 0)
        for found in values.values()
        for leaf in (found if isinstance(found, list) else [found])
    )
