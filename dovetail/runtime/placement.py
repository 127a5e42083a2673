"""Which worker of a plan hosts what, and how many copies of a side give to another."""

from dovetail.boundaries import How, Side
from dovetail.graph.ir import Arrival, Graph, Node, Unroll
from dovetail.plan.ir import Instance, Plan


def fragment_of(node: Node) -> str:
    """The fragment that says where a node is: of an unroll, its acting."""
    return f"{node.name}.act" if isinstance(node, Unroll) else node.name


def hosted(graph: Graph, plan: Plan, worker: str) -> list[Node]:
    """The nodes that a worker runs."""
    placed = {instance.fragment for instance in plan.instances if instance.worker == worker}
    return [node for node in graph.nodes if fragment_of(node) in placed]


def workers_of(graph: Graph, plan: Plan, side: Side) -> list[str]:
    """The workers that host a side, in the order of its copies."""
    names = [fragment_of(node) for node in graph.on(side)]
    placed = [instance for name in names for instance in plan.instances_of(name)]
    ordered = sorted(placed, key=lambda instance: instance.envs or (0, 0))
    return list(dict.fromkeys(instance.worker for instance in ordered))


def home_of(graph: Graph, plan: Plan) -> str:
    """The worker of the home side."""
    return workers_of(graph, plan, graph.home)[0]


def copies_on(graph: Graph, plan: Plan, worker: str) -> dict[Side, int]:
    """The sides that a worker hosts, and which copy of each."""
    sides = dict.fromkeys(node.side for node in hosted(graph, plan, worker))
    return {side: workers_of(graph, plan, side).index(worker) for side in sides}


def givers(graph: Graph, plan: Plan, side: Side) -> int:
    """How many instances of a side give to one update."""
    return plan.joined if side in graph.acting else len(workers_of(graph, plan, side))


def pieces(graph: Graph, plan: Plan, arrival: Arrival, side: Side) -> int:
    """How many pieces of what arrives come to one instance of a side."""
    senders, takers = givers(graph, plan, arrival.source), givers(graph, plan, side)
    if arrival.how is How.JOIN:
        return max(1, senders // takers)
    return senders if arrival.how is How.MEAN else 1


def stepping_for(plan: Plan, unroll: Unroll, acting: Instance) -> list[Instance]:
    """The instances that step the environments for which one acts."""
    return [i for i in plan.instances_of(f"{unroll.name}.step") if _within(i, acting)]


def _within(step: Instance, act: Instance) -> bool:
    """Whether an actor's environments include those that an instance steps."""
    if step.envs is None or act.envs is None:
        return True
    return act.envs[0] <= step.envs[0] < act.envs[1]


def steps_apart(graph: Graph, plan: Plan, worker: str) -> bool:
    """Whether other workers step the environments for which a worker acts."""
    return any(
        step.worker != worker
        for unroll in graph.unrolls
        for act in plan.instances_of(f"{unroll.name}.act")
        if act.worker == worker
        for step in stepping_for(plan, unroll, act)
    )


def names_many_devices(plan: Plan) -> bool:
    """Whether its workers are on several devices."""
    return len({device for worker in plan.workers for device in worker.devices}) > 1
