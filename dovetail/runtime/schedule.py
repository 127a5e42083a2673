"""Derives the schedule of every worker from the plan: its takes, programs and puts, in order."""

from collections.abc import Collection
from itertools import groupby

from dovetail.envs.resolve import Env
from dovetail.graph.ir import Fragment, Graph, Node, Slots
from dovetail.plan.ir import Plan
from dovetail.runtime.build import Programs
from dovetail.runtime.channels import Channels
from dovetail.runtime.host_unroll import HostUnroll
from dovetail.runtime.packing import Bundle, bundles_of
from dovetail.runtime.placement import copies_on, fragment_of, home_of, hosted
from dovetail.runtime.programs import compiled_together
from dovetail.runtime.remote import RemoteChain, RemoteWorker, RemoteWorkers
from dovetail.runtime.worker import Operation, ProgramChain, Put, RunningWorker, RunProgram, Take


class Workers:
    """The workers of a plan, their programs, and the channels between them."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        env: Env,
        patience: float,
        host: RemoteWorkers | None = None,
        here: Collection[str] | None = None,
    ) -> None:
        """`here` names the workers of this process; `host` connects to the others.

        Without `host`, only the workers `here` are created, as in a process without the home side.
        """
        self._graph, self._plan = graph, plan
        self._host, self._here = host, here
        self._home = home_of(graph, plan)
        self.channels = Channels(graph, plan)
        self.programs = Programs(graph, plan, env, patience)
        self.remote: list[tuple[RemoteChain, RunningWorker]] = []
        """The chains that other processes run, each with its worker here."""
        self.all: list[RunningWorker] = []
        for worker in plan.workers:
            nodes = hosted(graph, plan, worker.name)
            if nodes and (host is not None or self._is_here(worker.name)):
                self.all.append(self._worker(worker.name, nodes))

    @property
    def home(self) -> RunningWorker:
        """The worker of the home side; one of its turns is one update."""
        return next(worker for worker in self.all if worker.name == self._home)

    @property
    def is_one(self) -> bool:
        """Whether one worker does everything but stepping."""
        return len(self.all) == 1

    def close(self) -> None:
        """Closes the channels, the environments and the programs."""
        self.channels.close()
        self.programs.close()

    def _is_here(self, worker: str) -> bool:
        return self._here is None or worker in self._here

    def _worker(self, name: str, nodes: list[Node]) -> RunningWorker:
        """Creates a worker that hosts these nodes."""
        copies = copies_on(self._graph, self._plan, name)
        away = None
        if self._host is not None and not self._is_here(name):
            away = self._host.worker(name)
        worker = RunningWorker(name, copies, self._slots(copies), self._host, away)
        schedule = self._schedule(worker, nodes)
        if away is None:
            worker.schedule = [*schedule]
        else:
            worker.schedule = self._chains(schedule, worker, away)
        return worker

    def _slots(self, copies: Collection[str]) -> list[Slots[object]]:
        """The state that a worker with these sides holds between iterations."""
        state = self._graph.state
        pairs = zip(state.inputs, state.outputs, strict=True)
        own = [pair for pair in pairs if pair[0].side in copies]
        taken, made = tuple(old for old, _ in own), tuple(new for _, new in own)
        acts = any(side in copies for side in self._graph.acting)
        return [Slots(state.tree, taken, made)] + ([self._graph.actor] if acts else [])

    def _schedule(self, worker: RunningWorker, nodes: list[Node]) -> list[Operation]:
        """The operations of one turn, as if the worker ran in this process."""
        taken = set[int]()
        groups = self._groups(worker.name, nodes)
        schedule: list[Operation] = self._puts("state", worker)
        for node in self._graph.nodes:
            group = groups.get(node.name, [])
            if not group:  # on another worker, or compiled with an earlier node
                continue
            for part in group:
                schedule += self._takes(part, worker, taken)
            schedule.append(self._run(group, worker))
            for part in group:
                schedule += self._puts(part.name, worker)
        return schedule + self._reports(worker)

    def _takes(self, node: Node, worker: RunningWorker, taken: set[int]) -> list[Operation]:
        """The takes of a node, except for edges already in `taken`; adds its own to it."""
        graph, found = self._graph, list[Operation]()
        for i, channel in self.channels.of_edge.items():
            edge = graph.edges[i]
            if node.name not in edge.targets or i in taken:
                continue
            # One take serves all targets of an edge: the values stay in the turn's dictionary.
            taken.add(i)
            taker = worker.copies[edge.to_side]
            acting = edge.to_side in graph.acting
            found.append(Take(channel, taker, acting, edge.from_side in graph.acting))
        return found

    def _puts(self, source: str, worker: RunningWorker) -> list[Operation]:
        """The puts after a node has run; for "state", those of the incoming state."""
        graph, found = self._graph, list[Operation]()
        for i, channel in self.channels.of_edge.items():
            edge = graph.edges[i]
            if edge.source != source or edge.from_side not in worker.copies:
                continue
            _, takers = self.channels.ends(edge)
            here = any(self._is_here(name) for name in takers)
            away = any(not self._is_here(name) for name in takers)
            found.append(Put(channel, worker.copies[edge.from_side], here, away))
        return found

    def _reports(self, worker: RunningWorker) -> list[Operation]:
        """The end of a turn: acting copies report on their environments to the home side."""
        report = self.channels.report
        if report is None:
            return []
        for side in self._graph.acting:
            if side in worker.copies:
                return [Put(report, worker.copies[side])]
        return [Take(report, 0, arrives=True, report=True)] if worker.name == self._home else []

    def _groups(self, worker: str, nodes: list[Node]) -> dict[str, list[Node]]:
        """The nodes compiled into one program, by the name of the first."""
        together = self._plan.programs(worker)
        found: dict[str, list[Node]] = {}
        for node in nodes:
            mates = next(names for names in together if fragment_of(node) in names)
            apart = not isinstance(node, Fragment) or node.side in self._graph.acting
            first = node.name if apart else next(n.name for n in nodes if n.name in mates)
            found.setdefault(first, []).append(node)
        return found

    def _run(self, group: list[Node], worker: RunningWorker) -> RunProgram:
        """Builds the program of nodes that are compiled together."""
        first = group[0]
        whole = first if len(group) == 1 else compiled_together(group, self._graph)
        if isinstance(whole, Fragment) and first.side not in self._graph.acting:
            worker.bundles += self._bundles(whole, group, worker)
        if worker.away is not None:
            return RunProgram(None)
        program = self.programs.build(whole, worker)
        return RunProgram(program, noted=isinstance(program, HostUnroll))

    def _bundles(self, whole: Fragment, group: list[Node], worker: RunningWorker) -> list[Bundle]:
        """The bundles of state that only this program writes."""
        if worker.away is not None or len(self._plan.worker(worker.name).devices) > 1:
            return []
        read = {v.id for node in self._graph.nodes if node not in group for v in node.inputs}
        return bundles_of(whole, self._graph, read, len(worker.bundles))

    def _chains(
        self, schedule: list[Operation], worker: RunningWorker, away: RemoteWorker
    ) -> list[Operation | ProgramChain]:
        """Replaces the programs between two channels by one call to the worker's process."""
        made: list[Operation | ProgramChain] = []
        for number, chain in enumerate(chains_of(schedule)):
            made += chain.takes
            shared = [put.away for put in chain.puts]
            program = RemoteChain(worker.name, away, number, shared)
            self.remote.append((program, worker))
            made.append(ProgramChain(program, chain.puts))
        ends = [o for o in schedule if isinstance(o, Take) and o.report]
        return [*made, *ends]


class ChainOf:
    """Consecutive programs without a channel in between, with the channels around them."""

    def __init__(self, takes: list[Take]) -> None:
        self.takes = takes
        """The takes before them."""
        self.runs: list[RunProgram] = []
        self.puts: tuple[Put, ...] = ()
        """The puts after them."""


def chains_of(schedule: list[Operation]) -> list[ChainOf]:
    """Splits a schedule into chains. Every process must get the same chains: they are numbered.

    A chain ends with a put. Puts of the incoming state, before any program, are a chain of their
    own. The report that the home side takes belongs to none.
    """
    found: list[ChainOf] = []
    takes: list[Take] = []
    state_puts: list[Put] = []
    for kind, operations in groupby(schedule, key=type):
        if kind is RunProgram:
            found.append(ChainOf(takes))
            found[-1].runs = [o for o in operations if isinstance(o, RunProgram)]
            takes = []
        elif kind is Take:
            takes += [o for o in operations if isinstance(o, Take) and not o.report]
        elif found:
            found[-1].puts += tuple(o for o in operations if isinstance(o, Put))
        else:
            state_puts += [o for o in operations if isinstance(o, Put)]
    if state_puts:
        found.insert(0, ChainOf([]))
        found[0].puts = tuple(state_puts)
    return found
