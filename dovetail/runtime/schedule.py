"""From a plan to workers: which programs each runs, in which order, and what it takes and puts."""

from collections.abc import Collection
from itertools import groupby

from dovetail.envs.resolve import Env
from dovetail.graph.ir import Fragment, Graph, Node, Side, Slots, Unroll
from dovetail.plan.ir import Plan
from dovetail.runtime.away import Abroad, Outpost, RemoteProgram
from dovetail.runtime.build import Programs
from dovetail.runtime.bundles import Bundle, bundles_of
from dovetail.runtime.host import HostUnroll
from dovetail.runtime.hosting import (
    Role,
    copy_of,
    fragment_of,
    hosted,
    learner_of,
    role_of,
    shard_of,
)
from dovetail.runtime.links import Links
from dovetail.runtime.programs import compiled_together
from dovetail.runtime.worker import Operation, Run, Worker


class Crew:
    """The workers of a plan, the links between them, and the programs that they run."""

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
        self._graph, self._plan = graph, plan
        self._abroad, self._here = abroad, here
        self._learner = learner_of(graph, plan)
        everybody = all(self._is_here(worker.name) for worker in plan.workers)
        share = None if abroad is None or everybody else abroad.share
        self.links = Links(graph, plan, share)
        self.programs = Programs(graph, plan, env, patience)
        self.remote: list[tuple[RemoteProgram, Worker]] = []
        """What other processes run, each with its worker here."""
        self.workers: list[Worker] = []
        for worker in plan.workers:
            nodes = hosted(graph, plan, worker.name)
            if nodes and (abroad is not None or self._is_here(worker.name)):
                self.workers.append(self._worker(worker.name, nodes))

    @property
    def learner(self) -> Worker:
        """The worker that learns."""
        return next(worker for worker in self.workers if worker.name == self._learner)

    @property
    def keepers(self) -> list[Worker]:
        """The workers that keep the replay, if it is apart, in the order of its shards."""
        keeping = [worker for worker in self.workers if worker.errands is not None]
        return sorted(keeping, key=lambda worker: worker.copy)

    @property
    def is_one(self) -> bool:
        """Whether one worker does everything but stepping."""
        return len(self.workers) == 1

    def close(self) -> None:
        """Wakes who waits, and ends the environments."""
        self.links.close()
        self.programs.close()

    def _is_here(self, worker: str) -> bool:
        return self._here is None or worker in self._here

    def _worker(self, name: str, nodes: list[Node]) -> Worker:
        """A worker that hosts these nodes."""
        role, plan, away = role_of(nodes), self._plan, None
        copy = shard_of(plan, name) if role.keeps else copy_of(plan, name) if role.acts else 0
        errands = self.links.errands[copy] if role.keeps else None
        if self._abroad is not None and not self._is_here(name):
            away = self._abroad.outpost(name)
        holds = role.learns or (role.keeps and away is None)
        slots = [self._state_slots(role.keeps)] if holds else []
        slots += [self._graph.actor] if role.acts else []
        worker = Worker(name, copy, slots, away, errands)
        schedule = self._schedule(worker, role, nodes)
        worker.schedule = schedule if away is None else self._afar(schedule, worker, away)
        return worker

    def _state_slots(self, keeps: bool) -> Slots:
        """What of the learner's state a worker holds: its part of the replay, or all the rest."""
        state = self._graph.state
        if not self.links.errands:
            return state
        pairs = zip(state.inputs, state.outputs, strict=True)
        own = [pair for pair in pairs if (pair[0].side is Side.REPLAY) == keeps]
        return Slots(state.tree, *(tuple(values) for values in zip(*own, strict=True)))

    def _schedule(self, worker: Worker, role: Role, nodes: list[Node]) -> list[Operation]:
        """What a worker does in an iteration, as if it were here."""
        links, taken = self.links, set[int]()
        groups = self._groups(worker.name, nodes)
        schedule = links.puts("state", role)
        for node in self._graph.nodes:
            if role.learns and node.side is Side.REPLAY and links.errands:
                schedule += [*links.takes(node, role, taken), *links.asks(node)]
            group = groups.get(node.name, [])
            if not group:  # it is elsewhere, or compiled with one before it
                continue
            if role.keeps:
                schedule.append(links.takes_errand(node, worker.copy, worker.away is not None))
            for part in group if not role.keeps else []:
                schedule += links.takes(part, role, taken)
            schedule.append(self._run(group, worker, role))
            for part in group:
                schedule += links.puts(part.name, role)
            if role.keeps:
                schedule.append(links.answers(node, worker.copy))
        return schedule + links.ends(role)

    def _groups(self, worker: str, nodes: list[Node]) -> dict[str, list[Node]]:
        """By the name of the first, the nodes that are compiled into one program on a worker."""
        together = self._plan.programs(worker)
        found: dict[str, list[Node]] = {}
        for node in nodes:
            mates = next(names for names in together if fragment_of(node) in names)
            apart = isinstance(node, Unroll) or node.side is Side.ACTOR
            first = node.name if apart else next(n.name for n in nodes if n.name in mates)
            found.setdefault(first, []).append(node)
        return found

    def _run(self, group: list[Node], worker: Worker, role: Role) -> Run:
        """Runs nodes that are compiled together."""
        first = group[0]
        whole = first if len(group) == 1 else compiled_together(group, self._graph)
        keeps_state = (role.learns or role.keeps) and first.side is not Side.ACTOR
        if isinstance(whole, Fragment) and keeps_state:
            worker.bundles += self._bundles(whole, group, worker)
        program = self.programs.build(whole, worker) if worker.away is None else first
        return Run(program, noted=isinstance(program, HostUnroll))

    def _bundles(self, whole: Fragment, group: list[Node], worker: Worker) -> list[Bundle]:
        """What of the state a program takes and makes as one array: what it alone makes."""
        if worker.away is not None or len(self._plan.worker(worker.name).devices) > 1:
            return []
        read = {v.id for node in self._graph.nodes if node not in group for v in node.inputs}
        return bundles_of(whole, self._graph, read, len(worker.bundles))

    def _afar(self, schedule: list[Operation], worker: Worker, outpost: Outpost) -> list[Operation]:
        """A schedule whose stretches of programs between two links the worker's outpost runs."""
        made: list[Operation] = []
        stretch, taken = 0, list[int]()
        for is_run, group in groupby(schedule, key=lambda operation: isinstance(operation, Run)):
            operations = list(group)
            if not is_run:
                made += operations
                taken += self.links.standing(operations)
                continue
            program = RemoteProgram(worker.name, outpost, stretch, taken)
            program.heard_by(worker.watch.beat, worker.track)
            self.remote.append((program, worker))
            made.append(Run(program, noted=True))
            stretch, taken = stretch + 1, []
        return made
