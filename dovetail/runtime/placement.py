"""Queries on a plan: the worker of each node, and the number of copies that exchange values."""

from dovetail.boundaries import How, Side
from dovetail.graph.ir import Arrival, Graph, Node, Unroll
from dovetail.plan.ir import Instance, Plan


def fragment_of(node: Node) -> str:
    """The fragment that determines a node's worker; for an unroll, its acting half."""
    return f"{node.name}.act" if isinstance(node, Unroll) else node.name


def hosted(graph: Graph, plan: Plan, worker: str) -> list[Node]:
    """The nodes on a worker, in execution order."""
    placed = {instance.fragment for instance in plan.instances if instance.worker == worker}
    return [node for node in graph.nodes if fragment_of(node) in placed]


def workers_of(graph: Graph, plan: Plan, side: Side) -> list[str]:
    """The workers of a side, in the order of its copies."""
    names = [fragment_of(node) for node in graph.on(side)]
    placed = [instance for name in names for instance in plan.instances_of(name)]
    # The copies of a side are numbered in the order of their environments.
    ordered = sorted(placed, key=lambda instance: instance.envs or (0, 0))
    return list(dict.fromkeys(instance.worker for instance in ordered))


def home_of(graph: Graph, plan: Plan) -> str:
    """The worker of the home side."""
    return workers_of(graph, plan, graph.home)[0]


def copies_on(graph: Graph, plan: Plan, worker: str) -> dict[Side, int]:
    """The sides on a worker, each with the index of its copy."""
    sides = dict.fromkeys(node.side for node in hosted(graph, plan, worker))
    return {side: workers_of(graph, plan, side).index(worker) for side in sides}


def givers(graph: Graph, plan: Plan, side: Side) -> int:
    """Number of instances of a side that take part in one update."""
    return plan.joined if side in graph.acting else len(workers_of(graph, plan, side))


def pieces(graph: Graph, plan: Plan, arrival: Arrival, side: Side) -> int:
    """Number of pieces in which an input arrives at one instance of a side."""
    senders, takers = givers(graph, plan, arrival.source), givers(graph, plan, side)
    if arrival.how is How.JOIN:
        return max(1, senders // takers)
    return senders if arrival.how is How.MEAN else 1


def stepping_for(plan: Plan, unroll: Unroll, acting: Instance) -> list[Instance]:
    """The instances that step the environments of an acting instance."""
    return [i for i in plan.instances_of(f"{unroll.name}.step") if _within(i, acting)]


def _within(step: Instance, act: Instance) -> bool:
    """Whether a stepping instance serves the environments of an acting instance."""
    if step.envs is None or act.envs is None:
        return True
    return act.envs[0] <= step.envs[0] < act.envs[1]


def steps_apart(graph: Graph, plan: Plan, worker: str) -> bool:
    """Whether other workers step the environments of an acting worker."""
    return any(
        step.worker != worker
        for unroll in graph.unrolls
        for act in plan.instances_of(f"{unroll.name}.act")
        if act.worker == worker
        for step in stepping_for(plan, unroll, act)
    )


def names_many_devices(plan: Plan) -> bool:
    """Whether the workers of a plan use several devices."""
    return len({device for worker in plan.workers for device in worker.devices}) > 1
