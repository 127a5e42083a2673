"""The passes that complete a strategy's placement, in one ordered list.

A strategy only places fragments. These passes derive the rest in one place for all strategies: the
link of each edge, the processes of a cluster, and notes for the reader of the plan.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from dovetail.boundaries import Side
from dovetail.graph.ir import Edge, Fragment, Graph
from dovetail.graph.show import count
from dovetail.plan.ir import Instance, Link, LinkKind, Plan, Resources, WorkerKind
from dovetail.plan.processes import spread

STATE = "state"
"""The source of values sent from the incoming state, before any fragment has run."""


def carry_edges(plan: Plan, graph: Graph, resources: Resources) -> Plan:
    """Assigns every edge the cheapest link that its two ends allow.

    The two halves of an unroll are linked too: actions one way and observations the other, once per
    step and group of environments.
    """
    acting = {unroll.name: f"{unroll.name}.act" for unroll in graph.unrolls}
    links: list[Link] = []
    for edge in graph.edges:
        source = acting.get(edge.source, edge.source)
        for target in linked(plan, graph, edge):
            kind = _kind(plan, graph, source, target, edge.from_side)
            times = _transfers(plan, graph, edge)
            links.append(Link(edge.boundary, source, target, kind, edge.nbytes, times))
    for unroll in graph.unrolls:
        act, step = f"{unroll.name}.act", f"{unroll.name}.step"
        # An actor with several groups of environments makes more, smaller transfers.
        shares = max(1, len(plan.instances_of(step)) // max(1, plan.actors))
        calls = unroll.length * plan.joined * shares
        kind = _kind(plan, graph, act, step)
        # A host environment cannot be compiled, even on a fused worker.
        if unroll.step.program is None and kind is LinkKind.FUSED:
            kind = LinkKind.HANDOFF
        for boundary, ends, nbytes in zip(
            ("action", "observation"),
            ((act, step), (step, act)),
            unroll.per_step_bytes,
            strict=True,
        ):
            # `per_step_bytes` are those of all environments of an actor; a transfer serves one
            # group.
            links.append(Link(boundary, *ends, kind, nbytes // shares, calls))
    for node in graph.reaching:
        assert node.reach is not None
        ends = (node.name, node.reach.side) if node.reach.sends else (node.reach.side, node.name)
        times = _instances(plan, graph, node.side)
        # The node is its own connection, so its name is the boundary.
        links.append(Link(node.name, *ends, LinkKind.SOCKET, node.moved, times))
    return replace(plan, links=tuple(links))


def linked(plan: Plan, graph: Graph, edge: Edge) -> list[str]:
    """The target fragments of an edge's links.

    Every reader on the same worker has a link. If the edge leaves the worker, only the first reader
    has one: the others there share the values that arrived.
    """
    acting = {unroll.name: f"{unroll.name}.act" for unroll in graph.unrolls}
    source, targets = (
        (acting.get(edge.source, edge.source)),
        [acting.get(n, n) for n in edge.targets],
    )
    joined = [pairs(plan, graph, source, target, edge.from_side) for target in targets]
    crosses = any(one.worker != other.worker for ends in joined for one, other in ends)
    return targets[:1] if crosses else targets


def _transfers(plan: Plan, graph: Graph, edge: Edge) -> int:
    """Number of transfers between instances per iteration.

    Joining and dividing need one per copy of the larger side; copying to all takers does too.
    """
    senders, takers = (_instances(plan, graph, s) for s in (edge.from_side, edge.to_side))
    return max(senders, takers)


def _instances(plan: Plan, graph: Graph, side: Side) -> int:
    """Number of instances of a side in one update; the devices of a worker count as one."""
    if side in graph.acting:
        return plan.joined
    return max([len(plan.instances_of(node.name)) for node in graph.on(side)], default=1)


def _kind(plan: Plan, graph: Graph, source: str, target: str, side: Side = "") -> LinkKind:
    """The cheapest link between two fragments, given the workers of their instances."""
    joined = pairs(plan, graph, source, target, side)
    workers = {end.worker for pair in joined for end in pair}
    known = {worker.name: worker for worker in plan.workers}
    kinds = {known[name].kind for name in workers if name in known}
    if WorkerKind.PROCESS in kinds:
        # Per-step traffic uses shared memory, per-update traffic a pipe.
        steps = any(end.endswith(".step") for end in (source, target))
        return LinkKind.SHARED_MEMORY if steps else LinkKind.PIPE
    # Threads of this process. `spread` changes the queues that leave it on a cluster.
    if any(one.worker != other.worker for one, other in joined):
        return LinkKind.QUEUE
    # Consecutive fragments on one device form one program even if the worker is not fused.
    if joined and _is_next(graph, source, target) and len(known[joined[0][0].worker].devices) == 1:
        return LinkKind.FUSED
    fused = joined and all(known[name].fused for name in workers if name in known)
    return LinkKind.FUSED if fused else LinkKind.HANDOFF


def _is_next(graph: Graph, source: str, target: str) -> bool:
    """Whether only compiled fragments off the acting sides run from `source` to `target`."""
    names = [node.name for node in graph.nodes]
    if source not in names or target not in names:
        return False
    between = graph.nodes[names.index(source) : names.index(target) + 1]
    return bool(between) and all(
        isinstance(node, Fragment) and node.side not in graph.acting for node in between
    )


def pairs(
    plan: Plan, graph: Graph, source: str, target: str, side: Side = ""
) -> list[tuple[Instance, Instance]]:
    """The pairs of instances that exchange values over a link: those whose environments overlap.

    If `source` is the state, `side` is the side it lives on.
    """
    stateful = _hosts(plan, graph, side or graph.home)
    sources = stateful if source == STATE else plan.instances_of(source)
    return [
        (one, other)
        for one in sources
        for other in plan.instances_of(target)
        if one.envs is None or other.envs is None or _overlap(one.envs, other.envs)
    ]


def _hosts(plan: Plan, graph: Graph, side: Side) -> list[Instance]:
    names = [node.name for node in graph.on(side)]
    return [instance for name in names for instance in plan.instances_of(name)]


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def tell(plan: Plan, graph: Graph, resources: Resources) -> Plan:
    """Appends notes for the reader to those of the strategy."""
    return replace(plan, notes=(*plan.notes, *_told(plan, graph, resources)))


def _told(plan: Plan, graph: Graph, resources: Resources) -> Iterator[str]:
    """One sentence for each thing that the plan alone does not show."""
    if plan.staleness:
        how = "exactly" if plan.ordered else "at most"
        start = " (less at the start)" if plan.ordered else ""
        yield (
            f"trajectories are {how} {count(plan.staleness, 'version')} old{start} when learned "
            f"from; {graph.algorithm} corrects with {graph.correction}"
        )
    for side, place in {n.reach.side: n.reach.place for n in graph.reaching if n.reach}.items():
        yield f"the {side} is kept by {place}, which actors and learner reach directly"
    apart = table_workers(plan, graph)
    if apart:
        ahead = f", {count(plan.prefetch, 'update')} ahead" if plan.prefetch else ""
        yield (
            f"{count(len(apart), 'worker')} of {'its' if len(apart) == 1 else 'their'} own "
            f"{'keeps' if len(apart) == 1 else 'keep'} the replay, and "
            f"{'answers' if len(apart) == 1 else 'answer'} the learner{ahead}"
        )
    replicas = plan.copies_of(graph.home)
    if replicas > 1 and plan.ranks == 1:
        yield f"mean is an all-reduce over {count(replicas, 'device')}"
    if len(plan.workers) > resources.cores and not plan.processes:
        yield f"{len(plan.workers)} workers share {resources.cores} cores"


def table_workers(plan: Plan, graph: Graph) -> list[str]:
    """The workers that hold a table apart from the learner."""
    learners = {instance.worker for instance in _hosts(plan, graph, graph.home)}
    kept = [i.worker for side in graph.tables for i in _hosts(plan, graph, side)]
    return [name for name in dict.fromkeys(kept) if name not in learners]


PASSES: tuple[Callable[[Plan, Graph, Resources], Plan], ...] = (
    carry_edges,  # needs only the placement
    spread,  # changes the links between processes, so they must exist
    tell,  # last: describes the results of the others
)
"""In this order: a pass may rely on those before it."""
