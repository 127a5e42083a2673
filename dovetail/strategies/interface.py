"""The interface of strategies: small pure objects that map a graph to a plan.

A strategy is a frozen dataclass. Its fields are options, and the strings below them are their help
texts. It sees the graph and the resources, never the algorithm, and assigns fragments to workers.
Links and checks follow from that. The functions below write the common placements.
"""

import re
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any, Self

from dovetail.boundaries import ACTOR, LEARNER, REPLAY, Side
from dovetail.errors import UserError, check_option
from dovetail.graph.ir import Fragment, Graph, Python, Unroll
from dovetail.graph.show import count
from dovetail.plan.ir import Instance, Plan, Resources, Worker, WorkerKind

__all__ = ["Resources", "Strategy"]


@dataclass(frozen=True)
class SidePlacement:
    """A side on dedicated workers, as given to `--sides`."""

    side: Side
    copies: int
    process: bool

    @staticmethod
    def parse(text: str) -> "SidePlacement":
        """Parses "critic", "critic:2" (two copies) or "judge@process" (a separate process)."""
        found = re.fullmatch(r"([^:@\s]+)(?::(\d+))?(@process)?", text)
        if found is not None and found[2] is not None and int(found[2]) == 0:
            raise UserError(
                f"--sides {text!r} asks for no copy of {found[1]}: give 1 or more, or leave the "
                "side out, and it runs with the learner."
            )
        if found is None:
            raise UserError(
                f"--sides {text!r} names no side: write for instance critic, critic:2 for two "
                f"copies, or judge@process for a process of its own."
            )
        return SidePlacement(found[1], int(found[2] or 1), found[3] is not None)


@dataclass(frozen=True)
class Strategy:
    """Base class: the placement of every fragment.

    How many environments there are is the algorithm's option; `graph.num_envs` says it.
    """

    sides: tuple[str, ...] = field(default=(), kw_only=True)
    """Sides of the algorithm that get their own workers: critic, critic:2 for two copies, or
    judge@process for a process. Sides that a strategy does not place run with the learner."""

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Refuses `num_envs`, which strategies had in earlier versions."""
        if "num_envs" in options and "num_envs" not in {known.name for known in fields(cls)}:
            raise UserError(
                f"{cls.__name__} has no option num_envs, it only splits the environments: give it "
                f"to the algorithm, as in PPO(num_envs={options['num_envs']})."
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for text in self.sides:
            SidePlacement.parse(text)

    @property
    def name(self) -> str:
        """The name on the command line, such as "actor-learner"."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", type(self).__name__).lower()

    @property
    def traced_envs(self) -> bool:
        """Whether it compiles the environment, and so prefers a JAX version if there is one."""
        return False

    @property
    def devices_wanted(self) -> int:
        """Number of devices in its plan; on CPU they must be created before JAX starts."""
        return 1

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        """Places `graph` on `resources`; raises `UserError` with a sentence if it cannot."""
        raise NotImplementedError(f"{type(self).__name__} does not define plan(graph, resources).")

    def place(
        self,
        graph: Graph,
        workers: list[Worker],
        instances: list[Instance],
        joined: int | None = None,
        **more: Any,
    ) -> Plan:
        """Builds a plan from workers and instances; `more` are further fields of `Plan`.

        A side has as many copies as its fragments have instances. The results of `joined` acting
        copies make one update, by default of all. A side without an instance gets its own workers
        if it is listed in `sides`, and otherwise runs on the learner's worker.
        """
        order = {fragment: i for i, fragment in enumerate(graph.fragments)}
        workers, instances = list(workers), list(instances)
        self._place_others(graph, workers, instances)
        found = _copies(graph, workers, instances)
        return Plan(
            strategy=self.name,
            algorithm=graph.algorithm,
            env=graph.env,
            num_envs=graph.num_envs,
            copies=tuple(found.items()),
            joined=found.get(ACTOR, 1) if joined is None else joined,
            workers=tuple(workers),
            # In the order of the graph, so that a plan does not depend on how a strategy lists
            # them.
            instances=tuple(sorted(instances, key=lambda i: order.get(i.fragment, len(order)))),
            **more,
        )

    def _place_others(self, graph: Graph, workers: list[Worker], instances: list[Instance]) -> None:
        """Places the remaining sides: on their own workers if in `sides`, else with the learner."""
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
        # A plan without a learner is refused later, with a better sentence than an error here.
        home = next(learning, workers[0].name)
        for side in graph.sides:
            if side in (graph.home, *graph.acting):
                continue  # if the strategy forgot these, the checks report it
            nodes = [node for node in graph.on(side) if isinstance(node, Fragment | Python)]
            if not nodes or any(node.name in placed for node in nodes):
                continue
            if side not in apart:
                instances += on_side(graph, side, home)
                continue
            asked = apart[side]
            kind = WorkerKind.PROCESS if asked.process else WorkerKind.THREAD
            whom = f"copies of {side}"
            for i, share in enumerate(shares(0, graph.num_envs, asked.copies, whom)):
                name = side if asked.copies == 1 else f"{side}-{i}"
                workers.append(Worker(name, (0,), kind))
                # Copies divide the batch by the environments it came from.
                instances += on_side(graph, side, name, share if asked.copies > 1 else None)


def _copies(graph: Graph, workers: list[Worker], instances: list[Instance]) -> dict[Side, int]:
    """Number of copies of each side: one per instance.

    Placed once on a worker with several devices, the home side has a replica on each device, and so
    does a table fused with it.
    """
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


@dataclass(frozen=True, kw_only=True)
class Replicated(Strategy):
    """Base class of strategies that act and learn on every device."""

    devices: int = 1
    """Devices that each take an equal share of the environments."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("devices", self.devices, self.devices >= 1, "1 or more")

    @property
    def devices_wanted(self) -> int:
        """The option `devices`."""
        return self.devices


def shares(first: int, envs: int, parts: int, whom: str) -> list[tuple[int, int]]:
    """Splits `envs` environments, numbered from `first`, into `parts` equal half-open ranges."""
    check_option(whom, parts, parts >= 1, "1 or more")
    if envs % parts:
        raise _uneven(envs, parts, whom)
    size = envs // parts
    return [(first + i * size, first + (i + 1) * size) for i in range(parts)]


def _uneven(envs: int, parts: int, whom: str) -> UserError:
    """The refusal of a split, with the nearest numbers that would do."""
    below = envs - envs % parts
    divisors = [n for n in range(1, envs + 1) if envs % n == 0]
    fewer, more = (n for n in divisors if n < parts), (n for n in divisors if n > parts)
    fitting = [*list(fewer)[-1:], *list(more)[:1]]
    return UserError(
        f"{count(envs, 'environment')} cannot be split evenly among {parts} {whom}: use --num-envs "
        f"{_either([n for n in (below, below + parts) if n])}, or {_either(fitting)} instead of "
        f"{parts} {whom}."
    )


def _either(numbers: list[int]) -> str:
    """Numbers to choose from: "2", or "2 or 4"."""
    return " or ".join(map(str, numbers))


def on_side(
    graph: Graph, side: Side, worker: str, envs: tuple[int, int] | None = None
) -> list[Instance]:
    """Places one copy of a side on a worker: all its fragments, and `.act` of its unrolls."""
    return [
        Instance(f"{node.name}.act" if isinstance(node, Unroll) else node.name, worker, envs)
        for node in graph.on(side)
    ]


def on_learner(graph: Graph, worker: str) -> list[Instance]:
    """Places the learner side on a worker."""
    return on_side(graph, LEARNER, worker)


def on_replay(graph: Graph, worker: str, envs: tuple[int, int]) -> list[Instance]:
    """Places the replay shard for the rows of some environments on a worker."""
    return on_side(graph, REPLAY, worker, envs)


def on_actor(graph: Graph, worker: str, envs: tuple[int, int]) -> list[Instance]:
    """Places one copy of the actor side on a worker."""
    return on_side(graph, ACTOR, worker, envs)


def on_environment(graph: Graph, worker: str, envs: tuple[int, int]) -> list[Instance]:
    """Places the stepping of a range of environments on a worker."""
    return [Instance(f"{unroll.name}.step", worker, envs) for unroll in graph.unrolls]


def _others(graph: Graph) -> str:
    """The sides that `--sides` may name, in words."""
    names = [side for side in graph.sides if side not in (graph.home, *graph.acting)]
    return f"it has {', '.join(names)}" if names else "it has none"


def is_traced(graph: Graph) -> bool:
    """Whether the environments are JAX environments, compiled with the algorithm."""
    return all(unroll.step.program is not None for unroll in graph.unrolls)


def environment_worker(graph: Graph, name: str, processes: bool | None) -> Worker:
    """A worker that only steps environments: by default a process if they hold the GIL."""
    chosen = not graph.threads if processes is None else processes
    if chosen and graph.unrolls and is_traced(graph):
        raise UserError(
            f"{graph.env} is a JAX environment, which no other process needs to step: leave "
            f"--processes out."
        )
    return Worker(name, kind=WorkerKind.PROCESS if chosen else WorkerKind.THREAD)


def refuse_too_many_devices(wanted: int, resources: Resources, strategy: str) -> None:
    """Refuses a plan with more devices than there are."""
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
    """Refuses an invalid range of actors."""
    if min_actors is not None and not 1 <= min_actors <= most:
        raise UserError(f"--{what} {min_actors}..{most} is no range: begin with 1 to {most}.")


def staleness_of(graph: Graph, asked: int | None, default: int) -> int:
    """The requested bound, or else `default`, capped at what the algorithm tolerates."""
    if asked is not None:
        return asked
    return default if graph.staleness is None else min(default, graph.staleness)
