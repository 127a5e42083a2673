"""From a plan to workers: which programs each runs, in which order, and what it takes and puts.

Where the learner speaks to its actors once per iteration and then hears from them, everything that
crosses goes in one exchange; otherwise every edge has its own, in lockstep.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import jax

from dovetail.envs.resolve import Env
from dovetail.graph.ir import Fragment, Graph, Node, Side, Slots, Unroll
from dovetail.graph.primitives import COLLECTED
from dovetail.plan.ir import Instance, LinkKind, Plan
from dovetail.runtime.away import Abroad, Outpost, RemoteProgram
from dovetail.runtime.bundles import Bundle, bundles_of
from dovetail.runtime.errands import Errands
from dovetail.runtime.exchange import Exchange
from dovetail.runtime.host import Compiled, HostUnroll
from dovetail.runtime.inference import BatchedUnroll
from dovetail.runtime.placing import Device
from dovetail.runtime.programs import (
    FragmentProgram,
    ReplicatedProgram,
    UnrollProgram,
    Values,
    compiled_together,
)
from dovetail.runtime.stage import Stage, make_stage
from dovetail.runtime.wire import pack_all
from dovetail.runtime.worker import (
    Ask,
    Operation,
    PutAnswer,
    PutResults,
    PutWeights,
    Run,
    TakeAnswers,
    TakeErrand,
    TakeResults,
    TakeWeights,
    Worker,
)


class Crew:
    """The workers of a plan, the links between them, and the environments they step."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        env: Env,
        patience: float,
        abroad: Abroad | None = None,
        here: Collection[str] | None = None,
    ) -> None:
        """`here` names the workers of this process, `abroad` reaches the others; without it only
        those here are made, for an outpost."""
        self.workers: list[Worker] = []
        self.stages: dict[str, Stage] = {}
        """By the name of the worker that acts."""
        self.exchanges: list[Exchange] = []
        self.programs: list[Any] = []
        self.remote: list[tuple[RemoteProgram, Worker]] = []
        """What other processes run, each with its worker here."""
        self.acting: list[tuple[HostUnroll, Worker]] = []
        """The unrolls with environments on the host, each with its worker."""
        self._graph, self._plan, self._env, self._patience = graph, plan, env, patience
        self._devices = jax.devices() if _names_many_devices(plan) else None
        self._abroad, self._here = abroad, here
        self._compiled: dict[str, Compiled] = {}
        self._shared: dict[tuple[str, int | None], Any] = {}
        self._learner = _home(plan, graph, Side.LEARNER)
        self._errands = [Errands() for _ in range(plan.shards if _replay_apart(plan, graph) else 0)]
        self._unread: dict[int, list[Callable[[], None]]] = {}
        """By turn, what to call when the workers that keep a replay have read what actors sent."""
        self._report: Exchange | None = None
        """What ends an actor's iteration where every edge has an exchange of its own."""
        self._links = self._exchanges()
        for worker in plan.workers:
            hosted = self._hosted(worker.name)
            if hosted and (abroad is not None or self._is_here(worker.name)):
                self.workers.append(self._worker(worker.name, hosted))

    @property
    def learner(self) -> Worker:
        """The worker that learns."""
        return next(worker for worker in self.workers if worker.name == self._learner)

    @property
    def keepers(self) -> list[Worker]:
        """The workers that keep the replay, if it is apart, in the order of its shards."""
        keeping = [worker for worker in self.workers if worker.errands is not None]
        return sorted(keeping, key=lambda worker: worker.copy)

    def begin_at(self, turn: int) -> None:
        """The number of the first turn; before any."""
        for link in (*self.exchanges, *self._errands):
            link.begin_at(turn)

    def close_links(self) -> None:
        """Wakes who waits."""
        for link in (*self.exchanges, *self._errands):
            link.close()

    @property
    def is_one(self) -> bool:
        """Whether one worker does everything but stepping."""
        return len(self.workers) == 1

    @property
    def many_devices(self) -> bool:
        """Whether its programs run on several devices."""
        return self._devices is not None

    def steps_apart(self, worker: str) -> bool:
        """Whether other workers step the environments for which a worker acts."""
        return any(
            step.worker != worker and _within(step, act)
            for unroll in self._graph.unrolls
            for act in self._plan.instances_of(f"{unroll.name}.act")
            if act.worker == worker
            for step in self._plan.instances_of(f"{unroll.name}.step")
        )

    def close(self) -> None:
        """Wakes who waits, and ends the environments."""
        self.close_links()
        for stage in self.stages.values():
            stage.close()

    def _hosted(self, worker: str) -> list[Node]:
        """The nodes that a worker runs: an unroll where its acting is."""
        placed = {i.fragment for i in self._plan.instances if i.worker == worker}
        return [node for node in self._graph.nodes if _fragment(node) in placed]

    def _exchanges(self) -> dict[int, Exchange]:
        """The link of each edge between the learner's and the actors' workers, by its position."""
        plan, graph = self._plan, self._graph
        if not self._actors_are_apart():
            return {}
        sides = [(edge.from_side, edge.to_side) for edge in graph.edges]
        crossing = [i for i, ends in enumerate(sides) if Side.ACTOR in ends]

        def exchange() -> Exchange:
            groups = max(1, len(self._errands))
            made = Exchange(plan.actors, plan.joined, plan.staleness, plan.ordered, groups)
            self.exchanges.append(made)
            return made

        if _meets_once(graph):
            one = exchange()
            return dict.fromkeys(crossing, one)
        self._report = exchange()
        return {i: exchange() for i in crossing}

    def _is_here(self, worker: str) -> bool:
        return self._here is None or worker in self._here

    def _actors_are_apart(self) -> bool:
        return any(
            instance.worker != self._learner
            for node in self._graph.nodes
            if node.side is Side.ACTOR
            for instance in self._plan.instances_of(_fragment(node))
        )

    def _worker(self, name: str, hosted: list[Node]) -> Worker:
        learns = any(node.side is Side.LEARNER for node in hosted)
        acts = any(node.side is Side.ACTOR for node in hosted)
        keeps = not learns and any(node.side is Side.REPLAY for node in hosted)
        copy = self._shard(name) if keeps else self._copy(name) if acts else 0
        errands = self._errands[copy] if keeps else None
        away = None
        if self._abroad is not None and not self._is_here(name):
            away = self._abroad.outpost(name)
        slots = [self._state_slots(keeps)] if learns or (keeps and away is None) else []
        slots += [self._graph.actor] if acts else []
        schedule: list[Operation] = []
        worker = Worker(name, copy, schedule, slots, away, errands)
        put, taken = self._puts(learns, acts), set[int]()
        groups = self._groups(name, hosted)
        schedule += put("state")
        for node in self._graph.nodes:
            if learns and node.side is Side.REPLAY and self._errands:
                schedule += [*self._takes(node, learns, acts, taken), *self._asks(node)]
            group = groups.get(node.name, [])
            if not group:  # it is elsewhere, or compiled with one before it
                continue
            schedule += self._errand(node, errands, away) if errands is not None else []
            for part in group if errands is None else []:
                schedule += self._takes(part, learns, acts, taken)
            whole = node if len(group) == 1 else compiled_together(group, self._graph)
            if isinstance(whole, Fragment) and (learns or keeps) and node.side is not Side.ACTOR:
                worker.bundles += self._bundles(whole, group, worker)
            program = self._program(whole, worker) if away is None else node
            schedule.append(Run(program, noted=isinstance(program, HostUnroll)))
            for part in group:
                schedule += put(part.name)
            schedule += [PutAnswer(errands, node.name, self._answer(node))] if errands else []
        if acts and not learns:
            schedule += self._last_put()
        elif learns and self._report is not None:
            schedule.append(TakeResults(self._report, alone=False, name="report"))
        if away is not None:
            self._run_away(worker, schedule, away)
        return worker

    def _bundles(self, whole: Fragment, group: list[Node], worker: Worker) -> list[Bundle]:
        """What of the state a program takes and makes as one array: what it alone makes."""
        if worker.away is not None or len(self._plan.worker(worker.name).devices) > 1:
            return []
        read = {v.id for node in self._graph.nodes if node not in group for v in node.inputs}
        return bundles_of(whole, self._graph, read, len(worker.bundles))

    def _groups(self, worker: str, hosted: list[Node]) -> dict[str, list[Node]]:
        """By the name of the first, the nodes that are compiled into one program on a worker."""
        together = self._plan.programs(worker)
        found: dict[str, list[Node]] = {}
        for node in hosted:
            mates = next(names for names in together if _fragment(node) in names)
            apart = isinstance(node, Unroll) or node.side is Side.ACTOR
            first = node.name if apart else next(n.name for n in hosted if n.name in mates)
            found.setdefault(first, []).append(node)
        return found

    def _run_away(self, worker: Worker, schedule: list[Operation], outpost: Outpost) -> None:
        """Has every stretch of programs between two links run by the worker's outpost."""
        made: list[Operation] = []
        stretch, taken = 0, list[int]()
        for is_run, group in groupby(schedule, key=lambda operation: isinstance(operation, Run)):
            operations = list(group)
            if not is_run:
                made += operations
                taken += [self._place(o.exchange) for o in operations if isinstance(o, TakeWeights)]
                taken += [ERRAND for o in operations if isinstance(o, TakeErrand)]
                continue
            program = RemoteProgram(worker.name, outpost, stretch, taken)
            program.heard_by(worker.watch.beat, worker.track)
            self.remote.append((program, worker))
            made.append(Run(program, noted=True))
            stretch, taken = stretch + 1, []
        schedule[:] = made

    def _asks(self, node: Node) -> list[Operation]:
        """What the learner does where a node runs on the workers that keep the replay."""
        inputs = {value.id for value in node.inputs}
        coming = [edge for edge in self._graph.edges if node.name in edge.targets]
        sent = {
            side: tuple(
                dict.fromkeys(
                    value.id
                    for edge in coming
                    if edge.from_side is side
                    for value in edge.values
                    if value.id in inputs
                )
            )
            for side in (Side.ACTOR, Side.LEARNER)
        }
        names = "+".join(dict.fromkeys(edge.boundary for edge in coming))
        errands, unread = tuple(self._errands), self._unread
        asks: list[Operation] = [
            Ask(errands, node.name, sent[Side.ACTOR], sent[Side.LEARNER], unread, names)
        ]
        numbers = self._answer(node)
        if numbers or sent[Side.ACTOR]:
            ahead = self._plan.prefetch
            asks.append(TakeAnswers(errands, node.name, numbers, ahead, unread, COLLECTED))
        return asks

    def _answer(self, node: Node) -> tuple[int, ...]:
        """What goes from a replay's node to the learner."""
        made = {value.id for value in node.outputs}
        edges = [e for e in self._graph.edges if e.from_side is Side.REPLAY]
        return tuple(dict.fromkeys(v.id for e in edges for v in e.values if v.id in made))

    def _errand(self, node: Node, errands: Errands, away: Outpost | None) -> list[Operation]:
        """What a worker that keeps a part of the replay takes before it runs a node."""
        coming = [edge for edge in self._graph.edges if node.name in edge.targets]
        names = "+".join(dict.fromkeys(edge.boundary for edge in coming))
        wrap = dict if away is None else _wrapped
        return [TakeErrand(errands, node.name, wrap, names)]

    def _state_slots(self, keeps: bool) -> Slots:
        """What of the learner's state a worker holds: its part of the replay, or all the rest."""
        state = self._graph.state
        if not self._errands:
            return state
        pairs = zip(state.inputs, state.outputs, strict=True)
        own = [pair for pair in pairs if (pair[0].side is Side.REPLAY) == keeps]
        return Slots(state.tree, *(tuple(values) for values in zip(*own, strict=True)))

    def _shard(self, worker: str) -> int:
        """Which part of the replay a worker keeps."""
        first, _ = next(i.envs for i in self._plan.instances if i.worker == worker and i.envs)
        return first * self._plan.shards // self._plan.num_envs

    def _place(self, exchange: Exchange) -> int:
        """Where what stands for a link's shared values lies among the values of a turn."""
        return -1 - next(i for i, known in enumerate(self.exchanges) if known is exchange)

    def _share(self, exchange: Exchange) -> Callable[[Values], Values]:
        """What actors take from a link: the values; elsewhere, what stands for them."""
        abroad = self._abroad
        if abroad is None or all(self._is_here(w.name) for w in self._plan.workers):
            return dict
        return lambda values: {self._place(exchange): abroad.share(values)}

    def _puts(self, learns: bool, acts: bool) -> Callable[[str], list[Operation]]:
        """What is sent to other workers once a node has run."""
        graph, links = self._graph, self._links
        once = len(self.exchanges) == 1

        def put(source: str) -> list[Operation]:
            operations: list[Operation] = []
            for i, edge in enumerate(graph.edges):
                if i not in links or edge.source != source:
                    continue
                numbers = tuple(value.id for value in edge.values)
                if learns and edge.to_side is Side.ACTOR:
                    if not once or i == self._last_outward():
                        whole = self._outward() if once else numbers
                        share = self._share(links[i])
                        names = self._boundaries(outward=True) if once else edge.boundary
                        operations.append(PutWeights(links[i], whole, share, names))
                elif acts and not learns and edge.from_side is Side.ACTOR and not once:
                    sent = PutResults(links[i], numbers, graph, False, edge.boundary)
                    operations.append(sent)
            return operations

        return put

    def _last_outward(self) -> int:
        """The last edge to the actors: with it all that is broadcast is there."""
        order = {"state": -1} | {node.name: i for i, node in enumerate(self._graph.nodes)}
        outward = [i for i, e in enumerate(self._graph.edges) if e.to_side is Side.ACTOR]
        return max(outward, key=lambda i: (order[self._graph.edges[i].source], i))

    def _outward(self) -> tuple[int, ...]:
        edges = [e for e in self._graph.edges if e.to_side is Side.ACTOR]
        return tuple(dict.fromkeys(value.id for edge in edges for value in edge.values))

    def _last_put(self) -> list[Operation]:
        """An actor's parcel at the end of its iteration; in lockstep, the last edge carries it."""
        inward = [i for i, e in enumerate(self._graph.edges) if e.from_side is Side.ACTOR]
        if len(self.exchanges) == 1:
            numbers = dict.fromkeys(v.id for i in inward for v in self._graph.edges[i].values)
            exchange = self.exchanges[0]
            names = self._boundaries(outward=False)
            return [PutResults(exchange, tuple(numbers), self._graph, True, names)]
        assert self._report is not None
        return [PutResults(self._report, (), self._graph, True, "report")]

    def _boundaries(self, outward: bool) -> str:
        """The boundaries whose values go to the actors, or come from them, in one message."""
        ends = [(e.boundary, e.to_side if outward else e.from_side) for e in self._graph.edges]
        return "+".join(dict.fromkeys(name for name, side in ends if side is Side.ACTOR))

    def _takes(self, node: Node, learns: bool, acts: bool, taken: set[int]) -> list[Operation]:
        """What a node needs of other workers, and nobody has taken yet."""
        operations: list[Operation] = []
        for i, edge in enumerate(self._graph.edges):
            if i not in self._links or node.name not in edge.targets or (learns and acts):
                continue
            exchange = self._links[i]
            if id(exchange) in taken:
                continue
            taken.add(id(exchange))
            once = len(self.exchanges) == 1
            name = self._boundaries(outward=not learns) if once else edge.boundary
            if learns:
                alone = self._plan.joined == self._plan.replicas == 1
                operations.append(TakeResults(exchange, alone, name))
            else:
                operations.append(TakeWeights(exchange, not self._plan.ordered, name))
        return operations

    def _program(self, node: Node, worker: Worker) -> Any:
        if isinstance(node, Unroll):
            return self._unroll(node, worker)
        devices = self._plan.worker(worker.name).devices
        if len(devices) == 1:
            make = partial(self._fragment_program, [*worker.bundles, *self._beside(node, worker)])
            return self._once(node, devices[0], make)
        made = ReplicatedProgram(node, self._graph, [jax.devices()[d] for d in devices])
        self.programs.append(made)
        return made

    def _beside(self, node: Fragment, worker: Worker) -> list[Bundle]:
        """What a fragment takes in one piece from the unroll before it on the same worker."""
        if node.side is Side.ACTOR:
            return []
        unrolls = [program for program, owner in self.acting if owner is worker]
        found = [u.slab.bundle(node.inputs) for u in unrolls[-1:] if u.slab is not None]
        return [bundle for bundle in found if bundle is not None]

    def _once(self, node: Node, device: int, make: Callable[[Any, Any], Any]) -> Any:
        """A program that all copies of the actor on one device share."""
        key = (node.name, device if self._devices is not None else None)
        if key not in self._shared:
            self._shared[key] = make(node, self._device(device))
            self.programs.append(self._shared[key])
        return self._shared[key]

    def _device(self, number: int) -> Device | None:
        """None where there is only one to be on."""
        return None if self._devices is None else self._devices[number]

    def _fragment_program(
        self, bundles: Sequence[Bundle], node: Fragment, device: Device | None
    ) -> FragmentProgram:
        graph = self._graph
        pieces = {Side.ACTOR: 1, Side.REPLAY: graph.pieces // graph.shards}
        hosted = any(unroll.step.program is None for unroll in graph.unrolls)
        each = pieces.get(node.side, graph.pieces)
        own = [b for b in bundles if b.taken[0] in node.inputs]
        return FragmentProgram(node, each, graph.shards, device, hosted, own, graph.state)

    def _unroll(self, node: Unroll, worker: Worker) -> Any:
        plan, env = self._plan, self._env
        acting = next(i for i in plan.instances_of(f"{node.name}.act") if i.worker == worker.name)
        kind = next(
            link.kind
            for link in plan.links
            if link.boundary == "action" and link.source == f"{node.name}.act"
        )
        number = plan.worker(worker.name).devices[0]
        if kind is LinkKind.FUSED:
            assert env.jax is not None
            jax_env = env.jax
            return self._once(node, number, lambda u, d: UnrollProgram(u, jax_env, self._graph, d))
        stage = self._stage(node, worker.name, acting)
        compiled = self._compiled.setdefault(node.name, Compiled(node))
        device = self._device(number)
        if stage.groups:
            batch = plan.batch or self._graph.actor_envs
            program: Any = BatchedUnroll(
                node,
                self._graph,
                compiled,
                stage,
                worker.watch,
                worker.track,
                batch,
                plan.batch_seconds,
                device,
            )
        else:
            program = HostUnroll(
                node, self._graph, compiled, stage, worker.watch, worker.track, device
            )
        self.acting.append((program, worker))
        return program

    def _stage(self, node: Unroll, worker: str, acting: Instance) -> Stage:
        if worker not in self.stages:
            every = self._plan.instances_of(f"{node.name}.step")
            steps = [step for step in every if _within(step, acting)]
            self.stages[worker] = make_stage(self._plan, self._env, acting, steps, self._patience)
        return self.stages[worker]

    def _copy(self, worker: str) -> int:
        """Which copy of the actor side a worker hosts."""
        served = next(i.envs for i in self._plan.instances if i.worker == worker and i.envs)
        return served[0] // (self._plan.num_envs // self._plan.actors)


ERRAND = -1_000_000
"""Where what a worker elsewhere is asked for lies among the values of a turn."""


def _wrapped(values: Values) -> Values:
    """What a worker elsewhere is asked for, as it is sent there."""
    return {ERRAND: {number: pack_all(leaf) for number, leaf in values.items()}}


def _replay_apart(plan: Plan, graph: Graph) -> bool:
    """Whether workers of their own keep the replay."""
    learner = _home(plan, graph, Side.LEARNER)
    kept = [node.name for node in graph.nodes if node.side is Side.REPLAY]
    return any(i.worker != learner for name in kept for i in plan.instances_of(name))


def _fragment(node: Node) -> str:
    return f"{node.name}.act" if isinstance(node, Unroll) else node.name


def _within(step: Instance, act: Instance) -> bool:
    """Whether an actor's environments include those that an instance steps."""
    if step.envs is None or act.envs is None:
        return True
    return act.envs[0] <= step.envs[0] < act.envs[1]


def _home(plan: Plan, graph: Graph, side: Side) -> str:
    return next(
        instance.worker
        for node in graph.nodes
        if node.side is side
        for instance in plan.instances_of(_fragment(node))
    )


def _names_many_devices(plan: Plan) -> bool:
    return len({device for worker in plan.workers for device in worker.devices}) > 1


def _meets_once(graph: Graph) -> bool:
    """Whether all that goes to the actors is sent before anything comes back from them."""
    order = {"state": -1} | {node.name: i for i, node in enumerate(graph.nodes)}
    out = [order[edge.source] for edge in graph.edges if edge.to_side is Side.ACTOR]
    back = [order[t] for e in graph.edges if e.from_side is Side.ACTOR for t in e.targets]
    return bool(out) and bool(back) and max(out) < min(back)
