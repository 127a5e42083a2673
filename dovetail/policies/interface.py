"""What a distribution policy is: a small pure object that turns a graph into a plan.

A policy is a frozen dataclass; its fields are options, the strings beneath them their help. It sees
the graph and the machine's resources, never the algorithm, and writes down which worker hosts which
fragment; links and checks follow from that. The functions below write the usual placements.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from dovetail.errors import UserError, check_option
from dovetail.graph.ir import Fragment, Graph, Side, Unroll
from dovetail.plan.ir import Instance, Plan, Resources, Worker, WorkerKind

__all__ = ["Policy", "Resources", "Split"]


class Split(NamedTuple):
    """How a policy divides the environments; the loop is traced for this division."""

    replicas: int = 1
    """Learner replicas, each learning from an equal share."""
    actors: int = 1
    """Copies of the actor side, each with an equal share."""
    joined: int = 1
    """How many actors' results make one update: all of them, or 1 to learn as they arrive."""
    shards: int = 1
    """Equal parts in which a replay is kept."""
    batch: int | None = None
    """Environments that one call of acting serves; None for all that an actor has."""


@dataclass(frozen=True)
class Policy:
    """A distribution policy: the environments in all, and where everything goes."""

    envs: int = 8
    """Environments stepped side by side."""

    def __post_init__(self) -> None:
        check_option("envs", self.envs, self.envs >= 1, "1 or more")

    @property
    def name(self) -> str:
        """As on the command line: "actor-learner"."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", type(self).__name__).lower()

    @property
    def split(self) -> Split:
        """One learner, one actor, unless a policy says otherwise."""
        return Split()

    @property
    def traced_envs(self) -> bool:
        """Whether it compiles the environment, and so wants a JAX one where there is a choice."""
        return False

    @property
    def devices_wanted(self) -> int:
        """How many devices its plan names; on a CPU they are made before JAX starts."""
        return self.split.replicas

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        """Places `graph` (one replica's) on `resources`, or refuses with a sentence."""
        raise NotImplementedError(f"{type(self).__name__} does not define plan(graph, resources).")

    def place(
        self,
        graph: Graph,
        workers: list[Worker],
        instances: list[Instance],
        **more: Any,
    ) -> Plan:
        """The plan with these workers and instances; `more` are further fields of `Plan`."""
        order = {fragment: i for i, fragment in enumerate(graph.fragments)}
        return Plan(
            policy=self.name,
            algorithm=graph.algorithm,
            env=graph.env,
            num_envs=self.envs,
            replicas=self.split.replicas,
            actors=self.split.actors,
            joined=self.split.joined,
            shards=self.split.shards,
            workers=tuple(workers),
            instances=tuple(sorted(instances, key=lambda i: order.get(i.fragment, len(order)))),
            **more,
        )


@dataclass(frozen=True)
class Replicated(Policy):
    """A policy that acts and learns on each of some devices, on its share of the environments."""

    devices: int = 1
    """Devices that each take an equal share of the environments."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("devices", self.devices, self.devices >= 1, "1 or more")

    @property
    def split(self) -> Split:
        """One actor and one learner replica per device."""
        return Split(self.devices, self.devices, self.devices)


def shares(first: int, envs: int, parts: int, whom: str) -> list[tuple[int, int]]:
    """`envs` environments from number `first` on, as equal ranges for `parts` workers."""
    if parts < 1 or envs % parts:
        raise UserError(
            f"{envs} environments cannot be split evenly among {parts} {whom}: choose a multiple "
            f"of {max(parts, 1)} environments (--envs)."
        )
    size = envs // parts
    return [(first + i * size, first + (i + 1) * size) for i in range(parts)]


def on_learner(graph: Graph, worker: str, replay: bool = True) -> list[Instance]:
    """Every fragment of the learner's side, and of its replay's, on one worker."""
    sides = (Side.LEARNER, Side.REPLAY) if replay else (Side.LEARNER,)
    return [
        Instance(node.name, worker)
        for node in graph.nodes
        if isinstance(node, Fragment) and node.side in sides
    ]


def on_replay(graph: Graph, worker: str, envs: tuple[int, int]) -> list[Instance]:
    """Every fragment of one shard of a replay, with the rows of some environments, on a worker."""
    return [Instance(node.name, worker, envs) for node in graph.nodes if node.side is Side.REPLAY]


def on_actor(graph: Graph, worker: str, envs: tuple[int, int]) -> list[Instance]:
    """Every fragment of one copy of the actor's side on one worker, acting included."""
    return [
        Instance(f"{node.name}.act" if isinstance(node, Unroll) else node.name, worker, envs)
        for node in graph.nodes
        if node.side is Side.ACTOR
    ]


def on_environment(graph: Graph, worker: str, envs: tuple[int, int]) -> list[Instance]:
    """The stepping of a range of environments on one worker."""
    return [Instance(f"{unroll.name}.step", worker, envs) for unroll in graph.unrolls]


def is_traced(graph: Graph) -> bool:
    """Whether the environments are compiled with the algorithm."""
    return all(unroll.step.program is not None for unroll in graph.unrolls)


def environment_worker(graph: Graph, name: str, processes: bool | None) -> Worker:
    """A worker that only steps environments: a process where they hold Python's lock."""
    chosen = not graph.threads if processes is None else processes
    if chosen and graph.unrolls and is_traced(graph):
        raise UserError(
            f"{graph.env} is a JAX environment, which no other process needs to step: leave "
            f"--processes out."
        )
    return Worker(name, kind=WorkerKind.PROCESS if chosen else WorkerKind.THREAD)


def refuse_too_many_devices(wanted: int, resources: Resources, policy: str) -> None:
    """Refuses a plan that names more devices than there are."""
    if wanted > resources.devices and resources.cluster is not None:
        raise UserError(
            f"{policy} was asked for {wanted} devices, but the cluster has room for "
            f"{resources.devices}: ask for fewer."
        )
    if wanted > resources.devices:
        raise UserError(
            f"{policy} was asked for {wanted} devices, but this machine has {resources.devices}: "
            f"ask for fewer, or on a CPU set XLA_FLAGS="
            f"--xla_force_host_platform_device_count={wanted}."
        )


def check_fewest(fewest: int | None, most: int, what: str) -> None:
    """Refuses a range of actors that is none."""
    if fewest is not None and not 1 <= fewest <= most:
        raise UserError(f"--{what} {fewest}..{most} is no range: begin with 1 to {most}.")


def staleness_of(graph: Graph, asked: int | None, default: int) -> int:
    """The bound that was asked for; else `default`, or less where the algorithm bears less."""
    if asked is not None:
        return asked
    return default if graph.staleness is None else min(default, graph.staleness)
