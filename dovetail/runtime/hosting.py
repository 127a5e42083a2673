"""Which worker of a plan hosts what."""

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.graph.ir import Graph, Node, Side, Unroll
from dovetail.plan.ir import Instance, Plan


@dataclass(frozen=True)
class Role:
    """What a worker is to the others."""

    learns: bool
    acts: bool
    keeps: bool
    """Whether it keeps a part of the replay for a learner elsewhere."""


def role_of(nodes: Sequence[Node]) -> Role:
    """The role of a worker that hosts these nodes."""
    sides = {node.side for node in nodes}
    learns = Side.LEARNER in sides
    return Role(learns, Side.ACTOR in sides, not learns and Side.REPLAY in sides)


def fragment_of(node: Node) -> str:
    """The fragment that says where a node is: of an unroll, its acting."""
    return f"{node.name}.act" if isinstance(node, Unroll) else node.name


def hosted(graph: Graph, plan: Plan, worker: str) -> list[Node]:
    """The nodes that a worker runs."""
    placed = {instance.fragment for instance in plan.instances if instance.worker == worker}
    return [node for node in graph.nodes if fragment_of(node) in placed]


def learner_of(graph: Graph, plan: Plan) -> str:
    """The worker that learns."""
    return _workers(graph, plan, Side.LEARNER)[0]


def actors_apart(graph: Graph, plan: Plan) -> bool:
    """Whether others than the learner act."""
    learner = learner_of(graph, plan)
    return any(worker != learner for worker in _workers(graph, plan, Side.ACTOR))


def replay_apart(graph: Graph, plan: Plan) -> bool:
    """Whether workers of their own keep the replay."""
    learner = learner_of(graph, plan)
    return any(worker != learner for worker in _workers(graph, plan, Side.REPLAY))


def _workers(graph: Graph, plan: Plan, side: Side) -> list[str]:
    """Who hosts a side, by its nodes."""
    nodes = [node for node in graph.nodes if node.side is side]
    return [i.worker for node in nodes for i in plan.instances_of(fragment_of(node))]


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


def copy_of(plan: Plan, worker: str) -> int:
    """Which copy of the actor side a worker hosts."""
    return _first_env(plan, worker) // (plan.num_envs // plan.actors)


def shard_of(plan: Plan, worker: str) -> int:
    """Which part of the replay a worker keeps."""
    return _first_env(plan, worker) * plan.shards // plan.num_envs


def _first_env(plan: Plan, worker: str) -> int:
    first, _ = next(i.envs for i in plan.instances if i.worker == worker and i.envs)
    return first


def names_many_devices(plan: Plan) -> bool:
    """Whether its workers are on several devices."""
    return len({device for worker in plan.workers for device in worker.devices}) > 1
