"""Groups workers into the processes of a cluster and places these on nodes.

Per-step traffic stays inside a process: an actor and the workers that step for it. Per-update
traffic may cross nodes: the learner and its actors. A learner on several devices has one process
for every `learner_devices` of them.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from dovetail.boundaries import ACTOR
from dovetail.errors import UserError, nearest
from dovetail.graph.ir import Graph
from dovetail.graph.show import count
from dovetail.plan.ir import (
    Cluster,
    Instance,
    LinkKind,
    Needs,
    Node,
    Plan,
    Process,
    Resources,
    Worker,
    WorkerKind,
)


def spread(plan: Plan, graph: Graph, resources: Resources) -> Plan:
    """Groups the workers into processes and places these on the cluster's nodes.

    Queues that leave the learner's process become links through the object store. Without a
    cluster, the plan is returned as it is. Raises `UserError` if a process fits on no node.
    """
    cluster = resources.cluster
    if cluster is None:
        return _refuse_elastic(plan)
    processes = _Grouping(plan, graph, cluster).processes()
    away = {name for s in processes if not s.learns for name in s.workers}
    moved = {i.fragment for i in plan.instances if i.worker in away}
    links = tuple(
        replace(link, kind=LinkKind.OBJECT_STORE)
        if link.kind is LinkKind.QUEUE and moved & {link.source, link.target}
        else link
        for link in plan.links
    )
    placed = place(processes, cluster, plan.min_actors)
    return replace(
        plan, processes=placed, links=links, notes=(*plan.notes, *_told(plan, placed, cluster))
    )


def part_of(plan: Plan, rank: int) -> Plan:
    """The part of a plan for one learner process and its actors, with environments from 0.

    Devices are numbered as `jax.devices()` numbers those of all learner processes.
    """
    processes = tuple(process for process in plan.processes if process.rank == rank)
    names = {name for process in processes for name in process.workers}
    each = plan.num_envs // plan.ranks
    first = rank * each
    learner = plan.worker(processes[0].workers[0])
    # Actors on a device of no learner get device 0: their processes have one of their own.
    devices = {device: i for i, device in enumerate(learner.devices)}
    return replace(
        plan,
        processes=processes,
        num_envs=each,
        copies=tuple((side, n // plan.ranks if side == ACTOR else n) for side, n in plan.copies),
        joined=plan.joined // plan.ranks,
        workers=tuple(
            replace(worker, devices=tuple(devices.get(d, 0) for d in worker.devices))
            for worker in plan.workers
            if worker.name in names
        ),
        instances=tuple(
            i if i.envs is None else replace(i, envs=(i.envs[0] - first, i.envs[1] - first))
            for i in plan.instances
            if i.worker in names and (i.envs is None or first <= i.envs[0] < first + each)
        ),
    )


def _refuse_elastic(plan: Plan) -> Plan:
    if plan.min_actors is not None:
        raise UserError(
            f"Actors that join while a run goes on ({plan.min_actors}..{plan.actors}) need a "
            f"cluster: add --cluster, or give one number of actors."
        )
    return plan


class _Grouping:
    """Decides which workers share a process."""

    def __init__(self, plan: Plan, graph: Graph, cluster: Cluster) -> None:
        self._plan, self._graph, self._cluster = plan, graph, cluster
        names = [node.name for node in graph.on(graph.home)]
        placed = (i.worker for name in names for i in plan.instances_of(name))
        self._learner: Worker = plan.worker(next(placed))
        each = cluster.learner_devices
        if plan.replicas % each:
            raise UserError(
                f"{count(plan.replicas, 'learner replica')} cannot be put into processes of "
                f"{count(each, 'device')}: choose a divisor of {plan.replicas} for [learner] "
                f"devices."
            )
        self._ranks = plan.replicas // each

    def processes(self) -> list[Process]:
        """The learner processes, then those of other sides, then those of actors."""
        beside: dict[int, list[str]] = {rank: [] for rank in range(self._ranks)}
        groups: dict[tuple[int, str], list[str]] = {}
        for act in self._acting():
            worker = self._plan.worker(act.worker)
            names = [act.worker, *self._stepping(act)]
            rank = self._rank(act)
            # Arrays on one device cannot be shared between processes.
            if worker is self._learner or self._shares_device(worker):
                beside[rank] += names
            else:
                # By rank first: an actor belongs to the learner process that joins its unrolls.
                groups.setdefault((rank, self._process(worker)), []).extend(names)
        learner, needs = self._learner.name, self._cluster.learners
        made = [
            Process(
                "learner" if self._ranks == 1 else f"learner-{rank}",
                tuple(dict.fromkeys([learner, *names])),
                True,
                rank,
                cpus=needs.cpus * max(1, self._processes(names)),
                gpus=needs.gpus,
                others=needs.others,
            )
            for rank, names in beside.items()
        ]
        made += [self._serving(name) for name in self._apart()]
        return made + [self._acting_apart(rank, names) for (rank, _), names in groups.items()]

    def _apart(self) -> list[str]:
        """The workers of sides that neither learn nor act, unless they share the learner's."""
        graph = self._graph
        serving = [side for side in graph.sides if side not in (graph.home, *graph.acting)]
        names = [node.name for node in graph.on(*serving)]
        workers = dict.fromkeys(i.worker for name in names for i in self._plan.instances_of(name))
        return [name for name in workers if name != self._learner.name]

    def _serving(self, name: str) -> Process:
        needs = self._cluster.actors
        return Process(
            name, (name,), False, cpus=needs.cpus, gpus=needs.gpus, others=needs.others, keeps=True
        )

    def _acting_apart(self, rank: int, names: list[str]) -> Process:
        """A process that acts.

        With environment processes it reserves the CPUs of each of them and none for the actor,
        which mostly waits.
        """
        needs, unique = self._cluster.actors, tuple(dict.fromkeys(names))
        cpus = needs.cpus * max(1, self._processes(names))
        return Process(
            unique[0], unique, False, rank, cpus=cpus, gpus=needs.gpus, others=needs.others
        )

    def _acting(self) -> list[Instance]:
        return [
            i
            for unroll in self._graph.unrolls[:1]
            for i in self._plan.instances_of(f"{unroll.name}.act")
        ]

    def _stepping(self, act: Instance) -> list[str]:
        """The workers that step for an actor."""
        first, last = act.envs or (0, self._plan.num_envs)
        return [
            step.worker
            for unroll in self._graph.unrolls
            for step in self._plan.instances_of(f"{unroll.name}.step")
            if step.envs is None or first <= step.envs[0] < last
        ]

    def _processes(self, names: list[str]) -> int:
        kinds = [self._plan.worker(name).kind for name in set(names)]
        return kinds.count(WorkerKind.PROCESS)

    def _rank(self, act: Instance) -> int:
        first, _ = act.envs or (0, 0)
        # The environments are divided among the learner processes in equal, consecutive ranges.
        return first * self._ranks // self._plan.num_envs

    def _shares_device(self, worker: Worker) -> bool:
        """Whether a worker acts on the device of a learner replica, and so in its process."""
        return self._plan.replicas > 1 and worker.devices[0] in self._learner.devices

    def _process(self, worker: Worker) -> str:
        """The name of an actor's process.

        Actors on the same dedicated device share one process; any other actor has its own.
        """
        own = worker.devices[0] not in self._learner.devices
        return f"device {worker.devices[0]}" if own else worker.name


@dataclass
class _Room:
    """The remaining resources of a node while processes are placed."""

    node: Node
    cpus: float
    gpus: float
    others: dict[str, float]

    def fits(self, process: Process) -> bool:
        named = all(self.others.get(name, 0) >= amount for name, amount in process.others)
        return self.cpus >= process.cpus and self.gpus >= process.gpus and named

    def take(self, process: Process) -> None:
        self.cpus -= process.cpus
        self.gpus -= process.gpus
        for name, amount in process.others:
            self.others[name] -= amount


def place(
    processes: list[Process], cluster: Cluster, min_actors: int | None = None
) -> tuple[Process, ...]:
    """Assigns every process a node: learners on different nodes, actors where most CPUs are free.

    With `min_actors`, actors beyond that number may stay without a node and join later.
    """
    _refuse_unknown_nodes(cluster)
    rooms = [_Room(n, n.cpus, n.gpus, dict(n.others)) for n in cluster.nodes]
    placed: list[Process] = []
    there = Counter[tuple[bool, str]]()
    for process in processes:
        needs = cluster.learners if process.learns else cluster.actors
        fitting = [
            room
            for room in rooms
            if room.fits(process)
            and (not needs.nodes or _is_named(room.node, needs.nodes))
            and (needs.per_node is None or there[process.learns, room.node.id] < needs.per_node)
        ]
        actors = sum(not (other.learns or other.keeps) for other in placed)
        acts = not (process.learns or process.keeps)
        # An optional actor without room keeps an empty node and joins later.
        if not fitting and acts and min_actors is not None and actors >= min_actors:
            placed.append(process)
            continue
        if not fitting:
            raise UserError(_shortage(processes, process, cluster))
        # Only learners avoid each other; actors go wherever most is free.
        learners = there if process.learns else Counter[tuple[bool, str]]()
        # Greedy, in the order of the processes: learners come first.
        room = min(fitting, key=partial(_reluctance, process, learners))
        room.take(process)
        there[process.learns, room.node.id] += 1
        placed.append(replace(process, node=room.node.name))
    return tuple(placed)


def _reluctance(
    process: Process, learners: Counter[tuple[bool, str]], room: _Room
) -> tuple[int, int, float]:
    """Sort key for nodes, best first: few learners, no unneeded rare resources, many free CPUs."""
    rare = [room.gpus and not process.gpus]
    rare += [name not in dict(process.others) for name, amount in room.others.items() if amount]
    return learners[True, room.node.id], sum(map(bool, rare)), -room.cpus


def _is_named(node: Node, names: tuple[str, ...]) -> bool:
    return node.name in names or any(node.id.startswith(name) for name in names)


def _refuse_unknown_nodes(cluster: Cluster) -> None:
    known = [node.name for node in cluster.nodes]
    for name in (*cluster.learners.nodes, *cluster.actors.nodes):
        if not any(_is_named(node, (name,)) for node in cluster.nodes):
            raise UserError(f"The cluster has no node {name!r}: {nearest(name, known)}")


def _shortage(processes: list[Process], process: Process, cluster: Cluster) -> str:
    """The sentence for a process that fits on no node."""
    there = "; ".join(_room_text(node) for node in cluster.nodes) or "no node"
    needs = Needs(process.cpus, process.gpus, process.others)
    cpus, gpus = sum(s.cpus for s in processes), sum(s.gpus for s in processes)
    whole = f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")
    return (
        f"The cluster has no room for {process.name}, which needs {_needs_text(needs)}: the plan's "
        f"{count(len(processes), 'process', 'processes')} need {whole}, and there is free: "
        f"{there}. "
        f"Ask for fewer actors, or give each less in a deployment file (--deploy)."
    )


def _needs_text(needs: Needs) -> str:
    parts = [f"{needs.cpus:g} CPUs"]
    parts += [f"{needs.gpus:g} GPUs"] if needs.gpus else []
    parts += [f"{amount:g} of {name}" for name, amount in needs.others]
    return ", ".join(parts)


def _room_text(node: Node) -> str:
    return f"{_needs_text(Needs(node.cpus, node.gpus, node.others))} on {node.name}"


def _told(plan: Plan, processes: tuple[Process, ...], cluster: Cluster) -> Iterator[str]:
    """Notes, one for each choice."""
    ranks = [process for process in processes if process.learns]
    if len(ranks) > 1:
        where = count(len({s.node for s in ranks}), "node")
        yield (
            f"{len(ranks)} learner processes, apart from each other on {where}, reserved together; "
            f"mean is a collective between them (jax.distributed), not a message"
        )
    serving = [process for process in processes if process.keeps]
    if serving:
        names = ", ".join(dict.fromkeys(process.name.rstrip("-0123456789") for process in serving))
        yield (
            f"{count(len(serving), 'process', 'processes')} for {names}; what others send there, "
            f"and take from there, goes straight between the processes"
        )
    apart = [process for process in processes if not (process.learns or process.keeps)]
    if apart:
        yield (
            f"{count(len(apart), 'actor process', 'actor processes')}, each where most is free; "
            f"what steps for an actor is in its process or on its node, joined by shared memory"
        )
        yield "weights are put into the object store once per version, whoever reads them"
    if plan.min_actors is not None:
        yield f"begins with {count(plan.min_actors, 'actor')}; others join as room is found"
