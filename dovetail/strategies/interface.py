"""What a strategy is: a small pure object that turns a graph into a plan.

A strategy is a frozen dataclass; its fields are options, the strings beneath them their help. It
sees the graph and the machine's resources, never the algorithm, and writes down which worker hosts
which fragment; links and checks follow from that. The functions below write the usual placements.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dovetail.boundaries import ACTOR, LEARNER, REPLAY, Side
from dovetail.errors import UserError, check_option
from dovetail.graph.ir import Fragment, Graph, Python, Unroll
from dovetail.plan.ir import Instance, Plan, Resources, Worker, WorkerKind

__all__ = ["Resources", "Strategy"]


@dataclass(frozen=True)
class SidePlacement:
    """A side that has workers of its own."""

    side: Side
    copies: int
    process: bool

    @staticmethod
    def parse(text: str) -> "SidePlacement":
        """critic, critic:2 for two copies, judge@process for a process of its own."""
        found = re.fullmatch(r"([^:@\s]+)(?::([1-9]\d*))?(@process)?", text)
        if found is None:
            raise UserError(
                f"--sides {text!r} names no side: write for instance critic, critic:2 for two "
                f"copies, or judge@process for a process of its own."
            )
        return SidePlacement(found[1], int(found[2] or 1), found[3] is not None)


@dataclass(frozen=True)
class Strategy:
    """A strategy: the environments in all, and where everything goes."""

    num_envs: int = 8
    """Environments stepped side by side."""
    sides: tuple[str, ...] = field(default=(), kw_only=True)
    """Sides of the algorithm that get workers of their own: critic, or critic:2 for two copies, or
    judge@process for a process. Other sides that a strategy does not place are with the learner."""

    def __post_init__(self) -> None:
        check_option("num_envs", self.num_envs, self.num_envs >= 1, "1 or more")
        for text in self.sides:
            SidePlacement.parse(text)

    @property
    def name(self) -> str:
        """As on the command line: "actor-learner"."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", type(self).__name__).lower()

    @property
    def traced_envs(self) -> bool:
        """Whether it compiles the environment, and so wants a JAX one where there is a choice."""
        return False

    @property
    def devices_wanted(self) -> int:
        """How many devices its plan names; on a CPU they are made before JAX starts."""
        return 1

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        """Places `graph` on `resources`, or refuses with a sentence."""
        raise NotImplementedError(f"{type(self).__name__} does not define plan(graph, resources).")

    def place(
        self,
        graph: Graph,
        workers: list[Worker],
        instances: list[Instance],
        joined: int | None = None,
        **more: Any,
    ) -> Plan:
        """The plan with these workers and instances; `more` are further fields of `Plan`.

        A side has as many copies as its fragments have instances. `joined` of those that act make
        an update, all unless given. Sides without an instance go to workers of their own if
        `sides` asks for that, else to the learner's.
        """
        order = {fragment: i for i, fragment in enumerate(graph.fragments)}
        workers, instances = list(workers), list(instances)
        self._place_others(graph, workers, instances)
        found = _copies(graph, workers, instances)
        return Plan(
            strategy=self.name,
            algorithm=graph.algorithm,
            env=graph.env,
            num_envs=self.num_envs,
            copies=tuple(found.items()),
            joined=found.get(ACTOR, 1) if joined is None else joined,
            workers=tuple(workers),
            instances=tuple(sorted(instances, key=lambda i: order.get(i.fragment, len(order)))),
            **more,
        )

    def _place_others(self, graph: Graph, workers: list[Worker], instances: list[Instance]) -> None:
        """Places the sides that nobody has placed, and those that are to be apart."""
        apart = {asked.side: asked for asked in map(SidePlacement.parse, self.sides)}
        placed = {instance.fragment for instance in instances}
        for side in apart:
            if side not in graph.sides or side in (graph.home, *graph.acting):
                raise UserError(
                    f"--sides {side} asks for workers of its own for a side that {graph.algorithm} "
                    f"does not have beside those that learn and act: {_others(graph)}."
                )
        names = [node.name for node in graph.on(graph.home)]
        learning = (i.worker for i in instances if i.fragment in names)
        home = next(learning, workers[0].name)
        for side in graph.sides:
            if side in (graph.home, *graph.acting):
                continue  # whoever forgets these is told by the checks
            nodes = [node for node in graph.on(side) if isinstance(node, Fragment | Python)]
            if not nodes or any(node.name in placed for node in nodes):
                continue
            if side not in apart:
                instances += on_side(graph, side, home)
                continue
            asked = apart[side]
            kind = WorkerKind.PROCESS if asked.process else WorkerKind.THREAD
            whom = f"copies of {side}"
            for i, share in enumerate(shares(0, self.num_envs, asked.copies, whom)):
                name = side if asked.copies == 1 else f"{side}-{i}"
                workers.append(Worker(name, (0,), kind))
                instances += on_side(graph, side, name, share if asked.copies > 1 else None)


def _copies(graph: Graph, workers: list[Worker], instances: list[Instance]) -> dict[Side, int]:
    """How many copies each side has: one for each instance. Placed once on several devices, the
    home side has a replica on each, and so has a table that is compiled with it."""
    placed = Counter(instance.fragment for instance in instances)
    known = {worker.name: worker for worker in workers}
    hosts = {instance.fragment: known.get(instance.worker) for instance in instances}
    found: dict[Side, int] = {}
    for side in graph.sides:
        name = next((i.fragment for i in on_side(graph, side, "")), "")
        host, found[side] = hosts.get(name), max(1, placed[name])
        if found[side] == 1 and host is not None:
            replicated = side == graph.home or (side in graph.tables and host.fused)
            found[side] = len(host.devices) or 1 if replicated else 1
    return found


@dataclass(frozen=True)
class Replicated(Strategy):
    """A strategy that acts and learns on each of some devices, on its share of the environments."""

    devices: int = 1
    """Devices that each take an equal share of the environments."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("devices", self.devices, self.devices >= 1, "1 or more")

    @property
    def devices_wanted(self) -> int:
        """All of them."""
        return self.devices


def shares(first: int, envs: int, parts: int, whom: str) -> list[tuple[int, int]]:
    """`envs` environments from number `first` on, as equal ranges for `parts` workers."""
    if parts < 1 or envs % parts:
        raise UserError(
            f"{envs} environments cannot be split evenly among {parts} {whom}: choose a multiple "
            f"of {max(parts, 1)} environments (--num-envs)."
        )
    size = envs // parts
    return [(first + i * size, first + (i + 1) * size) for i in range(parts)]


def on_side(
    graph: Graph, side: Side, worker: str, envs: tuple[int, int] | None = None
) -> list[Instance]:
    """Every fragment of one copy of a side on one worker; of an unroll, its acting."""
    return [
        Instance(f"{node.name}.act" if isinstance(node, Unroll) else node.name, worker, envs)
        for node in graph.on(side)
    ]


def on_learner(graph: Graph, worker: str) -> list[Instance]:
    """Every fragment of the learner's side on one worker."""
    return on_side(graph, LEARNER, worker)


def on_replay(graph: Graph, worker: str, envs: tuple[int, int]) -> list[Instance]:
    """Every fragment of one shard of a replay, with the rows of some environments, on a worker."""
    return on_side(graph, REPLAY, worker, envs)


def on_actor(graph: Graph, worker: str, envs: tuple[int, int]) -> list[Instance]:
    """Every fragment of one copy of the actor's side on one worker, acting included."""
    return on_side(graph, ACTOR, worker, envs)


def on_environment(graph: Graph, worker: str, envs: tuple[int, int]) -> list[Instance]:
    """The stepping of a range of environments on one worker."""
    return [Instance(f"{unroll.name}.step", worker, envs) for unroll in graph.unrolls]


def _others(graph: Graph) -> str:
    """The sides that may be apart, in words."""
    names = [side for side in graph.sides if side not in (graph.home, *graph.acting)]
    return f"it has {', '.join(names)}" if names else "it has none"


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


def refuse_too_many_devices(wanted: int, resources: Resources, strategy: str) -> None:
    """Refuses a plan that names more devices than there are."""
    if wanted > resources.devices and resources.cluster is not None:
        raise UserError(
            f"{strategy} was asked for {wanted} devices, but the cluster has room for "
            f"{resources.devices}: ask for fewer."
        )
    if wanted > resources.devices:
        raise UserError(
            f"{strategy} was asked for {wanted} devices, but this machine has {resources.devices}: "
            f"ask for fewer, or on a CPU set XLA_FLAGS="
            f"--xla_force_host_platform_device_count={wanted}."
        )


def check_min_actors(min_actors: int | None, most: int, what: str) -> None:
    """Refuses a range of actors that is none."""
    if min_actors is not None and not 1 <= min_actors <= most:
        raise UserError(f"--{what} {min_actors}..{most} is no range: begin with 1 to {most}.")


def staleness_of(graph: Graph, asked: int | None, default: int) -> int:
    """The bound that was asked for; else `default`, or less where the algorithm bears less."""
    if asked is not None:
        return asked
    return default if graph.staleness is None else min(default, graph.staleness)
