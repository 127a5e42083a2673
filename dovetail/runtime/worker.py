"""The one loop that runs any fragment instance: take inputs from links, run programs, put outputs.

A worker's schedule is worked out from the plan: for each of its nodes, in the graph's order, what
to take before and what to put after. What its side keeps from one iteration to the next lies in
`held`. Nothing here knows which policy made the plan.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dovetail.graph.ir import Graph, Slots
from dovetail.graph.primitives import PARTS_AXIS
from dovetail.runtime.away import Outpost
from dovetail.runtime.bundles import Bundle
from dovetail.runtime.errands import Errands
from dovetail.runtime.exchange import ENOUGH, Exchange, Parcel
from dovetail.runtime.programs import Values
from dovetail.runtime.watch import Watch
from dovetail.telemetry.spans import COMPUTE, LINK, QUEUE, ROOM, WAIT, Track


@dataclass
class Turn:
    """One iteration of one worker."""

    number: int
    version: int = 0
    """Of the weights it works with."""
    parcels: list[Parcel] = field(default_factory=list)
    """What it took from actors."""
    releases: list[Callable[[], None]] = field(default_factory=list)
    """What to call when the arrays it made have been read."""
    begun: list[Exchange] = field(default_factory=list)
    """Links that count on its results."""


class Operation(Protocol):
    """A step of a worker's schedule."""

    def __call__(self, worker: "Worker", values: Values, turn: Turn) -> None:
        """Does it, on the values of this iteration."""
        ...


class Worker:
    """Hosts fragment instances and runs them round and round."""

    def __init__(
        self,
        name: str,
        copy: int,
        slots: list[Slots],
        away: Outpost | None = None,
        errands: Errands | None = None,
    ) -> None:
        self.name = name
        self.errands = errands
        """What it does for the learner, if it keeps a part of the replay."""
        self.away = away
        """The process where its programs run, if that is another: it only takes and puts here."""
        self.copy = copy
        """Which copy of the actor side it hosts, or which part of the replay, if it does."""
        self.watch = Watch(name)
        self.track = Track(name)
        self.held: Values = {}
        self.seconds: dict[str, float] = {}
        self.schedule: list[Operation] = []
        """What it does in an iteration."""
        self.bundles: list[Bundle] = []
        """What it holds of the state as one array each."""
        self._slots = slots

    def turn(self, number: int) -> tuple[Values, Turn]:
        """One iteration; what it keeps changes only when all of it has succeeded."""
        values, turn = dict(self.held), Turn(number)
        try:
            for operation in self.schedule:
                operation(self, values, turn)
        except BaseException:
            for exchange in turn.begun:
                exchange.abandon(self.copy)
            for release in turn.releases:
                release()
            raise
        self.held = self.kept(values)
        if self.errands is not None:
            self.errands.finish(number)
        self.watch.warm = True
        self.watch.idle()
        return values, turn

    def kept(self, values: Values) -> Values:
        """What goes into the next iteration, of what an iteration ended with."""
        kept = {
            taken.id: values[made.id]
            for slots in self._slots
            for taken, made in zip(slots.inputs, slots.outputs, strict=True)
            if made.id in values
        }
        return kept | {b.number_taken: values[b.number_made] for b in self.bundles}

    def hold(self, state: Values) -> None:
        """Holds values of the state, together where they go together."""
        for bundle in self.bundles:
            state[bundle.number_taken] = bundle.pack([state[v.id] for v in bundle.taken])
            for value in bundle.taken:
                if value.id not in bundle.shared:
                    del state[value.id]
        self.held |= state

    def all_held(self) -> Values:
        """What it holds, each by itself."""
        found = dict(self.held)
        for bundle in self.bundles:
            leaves = bundle.unpack(self.held[bundle.number_taken])
            found |= {value.id: leaf for value, leaf in zip(bundle.taken, leaves, strict=True)}
        return found

    def apart(self, values: Values) -> Values:
        """What an iteration made of what goes together, each by itself."""
        found: Values = {}
        for bundle in self.bundles:
            leaves = bundle.unpack(values[bundle.number_made])
            found |= {value.id: leaf for value, leaf in zip(bundle.made, leaves, strict=True)}
        return found


@dataclass(frozen=True)
class Run:
    """Runs a program."""

    program: Any
    noted: bool = False
    """Whether the program notes its spans by itself."""

    def __call__(self, worker: Worker, values: Values, turn: Turn) -> None:
        """The program takes its inputs from `values` and puts its outputs there."""
        worker.watch.doing(f"running {self.program.name}")
        began = time.perf_counter()
        release = self.program.run(values)
        if release is not None:
            turn.releases.append(release)
        spent = time.perf_counter() - began
        worker.seconds[self.program.name] = worker.seconds.get(self.program.name, 0.0) + spent
        if not self.noted:
            worker.track.add(COMPUTE, self.program.name, began, spent, version=turn.version)


@dataclass(frozen=True)
class PutWeights:
    """Sends values to the actors."""

    exchange: Exchange
    numbers: tuple[int, ...]
    share: Callable[[Values], Values] = dict
    """What the actors take: the values, or where they are found."""
    name: str = "broadcast"

    def __call__(self, worker: Worker, values: Values, turn: Turn) -> None:
        """By the number of updates they have seen."""
        sent = {number: values[number] for number in self.numbers}
        began = time.perf_counter()
        self.exchange.put_weights(turn.number, self.share(sent))
        spent = time.perf_counter() - began
        worker.track.add(LINK, self.name, began, spent, 1, size(sent), 1, turn.number)


@dataclass(frozen=True)
class TakeWeights:
    """Takes values from the learner."""

    exchange: Exchange
    counted: bool
    """Whether the link counts the unrolls that were begun."""
    name: str = "broadcast"

    def __call__(self, worker: Worker, values: Values, turn: Turn) -> None:
        """Waits until this unroll may begin."""
        began, waited = time.perf_counter(), worker.watch.waited
        turn.version, found = self.exchange.take_weights(turn.number, worker.watch, worker.copy)
        _note_wait(worker, "weights", began, waited, turn.version)
        now = time.perf_counter()
        sent = self.exchange.sent_at(turn.version) or now
        worker.track.add(QUEUE, self.name, sent, now - sent, version=turn.version)
        if self.counted:
            turn.begun.append(self.exchange)
        values.update(found)


@dataclass(frozen=True)
class PutResults:
    """Sends values to the learner."""

    exchange: Exchange
    numbers: tuple[int, ...]
    graph: Graph
    last: bool
    """Whether the iteration is complete with it: the actor's state and its episodes go along."""
    name: str = "gather"

    def __call__(self, worker: Worker, values: Values, turn: Turn) -> None:
        """One parcel, which says which version made it."""
        graph, sent = self.graph, {number: values[number] for number in self.numbers}
        actor = [values[v.id] for v in graph.actor.outputs] if self.last else []
        episodes = [values[v.id] for v in graph.episodes] if self.last else []
        releases = turn.releases if self.last else []
        began, waited = time.perf_counter(), worker.watch.waited
        self.exchange.put(
            Parcel(worker.copy, turn.number, turn.version, sent, actor, episodes, releases),
            worker.watch,
        )
        _note_wait(worker, "results", began, waited, turn.version)
        at = began + worker.watch.waited - waited
        spent = time.perf_counter() - at
        worker.track.add(LINK, self.name, at, spent, 1, size(sent), 1, turn.version)
        if self.last:
            turn.begun, turn.releases = [], []


@dataclass(frozen=True)
class TakeResults:
    """Takes values from the actors."""

    exchange: Exchange
    alone: bool
    """Whether one actor's values are taken as they are, not as a list of pieces."""
    name: str = "gather"

    def __call__(self, worker: Worker, values: Values, turn: Turn) -> None:
        """Waits for as many parcels as make an update."""
        began, waited = time.perf_counter(), worker.watch.waited
        parcels = self.exchange.take(turn.number, worker.watch)
        _note_wait(worker, "results", began, waited, turn.number)
        now, depth = time.perf_counter(), self.exchange.depth
        for p in parcels:
            lay, behind = now - p.sent, turn.number - p.version
            worker.track.add(QUEUE, self.name, p.sent, lay, 1, 0, depth, p.version, behind)
        turn.parcels += parcels
        numbers: Mapping[int, Any] = parcels[0].values
        if self.alone:
            values.update(numbers)
        else:
            values.update({number: [p.values[number] for p in parcels] for number in numbers})


@dataclass(frozen=True)
class Ask:
    """Asks the workers that keep a replay to run a node of theirs, each on its part."""

    errands: tuple[Errands, ...]
    """To each shard's worker."""
    node: str
    joined: tuple[int, ...]
    """Values that the actors sent: each shard gets those of its own."""
    divided: tuple[int, ...]
    """Values of the learner's, of which each shard gets an equal part."""
    unread: dict[int, list[Callable[[], None]]]
    """By turn, what to call when what the actors sent has been read."""
    name: str

    def __call__(self, worker: Worker, values: Values, turn: Turn) -> None:
        """Does not wait for them."""
        began, sent = time.perf_counter(), 0
        for i, errands in enumerate(self.errands):
            request = {number: self._pieces(values[number], i) for number in self.joined}
            request |= {number: self._part(values[number], i) for number in self.divided}
            errands.ask(self.node, turn.number, request)
            sent += size(request)
        releases = self.unread.setdefault(turn.number, [])
        for parcel in turn.parcels:
            releases += parcel.releases
            parcel.releases = []
        spent, count = time.perf_counter() - began, len(self.errands)
        worker.track.add(LINK, self.name, began, spent, count, sent, 1, turn.number)

    def _pieces(self, pieces: Any, shard: int) -> Any:
        """The pieces of a shard's own actors, or the one piece that there is."""
        if not isinstance(pieces, list):
            return pieces
        each = len(pieces) // len(self.errands)
        own = pieces[shard * each : (shard + 1) * each]
        return own if each > 1 else own[0]

    def _part(self, leaf: Any, shard: int) -> Any:
        if len(self.errands) == 1:
            return leaf
        each = leaf.shape[PARTS_AXIS] // len(self.errands)
        return leaf[:, shard * each : (shard + 1) * each]


@dataclass(frozen=True)
class TakeAnswers:
    """Takes what the workers that keep a replay made of a node."""

    errands: tuple[Errands, ...]
    node: str
    numbers: tuple[int, ...]
    ahead: int
    """How many turns ago it was asked for."""
    unread: dict[int, list[Callable[[], None]]]
    name: str

    def __call__(self, worker: Worker, values: Values, turn: Turn) -> None:
        """Waits for all of them."""
        asked = max(self.errands[0].first, turn.number - self.ahead)
        began, waited = time.perf_counter(), worker.watch.waited
        found = [e.answered(self.node, asked, worker.watch) for e in self.errands]
        _note_wait(worker, "answers", began, waited, turn.number)
        for number in self.numbers:
            parts = [answer[number] for answer in found]
            values[number] = parts if len(parts) > 1 else parts[0]
        for read in [number for number in self.unread if number <= asked]:
            turn.releases += self.unread.pop(read)
        at, taken = began + worker.watch.waited - waited, sum(map(size, found))
        spent = time.perf_counter() - at
        worker.track.add(LINK, self.name, at, spent, len(found), taken, 1, asked)


@dataclass(frozen=True)
class TakeErrand:
    """Takes what a node of a kept replay is to be run on."""

    errands: Errands
    node: str
    wrap: Callable[[Values], Values] = dict
    """What goes among the values: these, or what stands for them."""
    name: str = "draw"

    def __call__(self, worker: Worker, values: Values, turn: Turn) -> None:
        """Waits until the learner asks."""
        turn.version = turn.number
        began, waited = time.perf_counter(), worker.watch.waited
        found, sent = self.errands.asked(self.node, turn.number, worker.watch)
        _note_wait(worker, "requests", began, waited, turn.number)
        lay = time.perf_counter() - sent
        worker.track.add(QUEUE, self.name, sent, lay, version=turn.number)
        values.update(self.wrap(found))


@dataclass(frozen=True)
class PutAnswer:
    """Sends what a node of a kept replay made to the learner."""

    errands: Errands
    node: str
    numbers: tuple[int, ...]

    def __call__(self, worker: Worker, values: Values, turn: Turn) -> None:
        """Nobody is waited for."""
        answer = {number: values[number] for number in self.numbers}
        self.errands.answer(self.node, turn.number, answer)


def size(values: Values) -> int:
    """Bytes of the arrays."""
    return sum(
        getattr(leaf, "nbytes", 0)
        for found in values.values()
        for leaf in (found if isinstance(found, list) else [found])
    )


def _note_wait(worker: Worker, what: str, began: float, before: float, version: int) -> None:
    waited = worker.watch.waited - before
    if waited > 0:
        what = ROOM if worker.watch.awaited == ENOUGH else what
        worker.track.add(WAIT, what, began, waited, version=version)
