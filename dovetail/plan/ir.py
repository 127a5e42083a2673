"""The physical plan: fragment instances on workers, and the link that carries each edge.

A plan is data: it prints, serializes and can be checked; the runtime runs any plan and knows no
strategy. A side may stand in several copies, each with its own share of the environments, or of a
batch; each fragment of it then has an instance per copy, and a link stands for the transfers of all
of them. Copies of a side that learns together are devices of one worker.
"""

from dataclasses import dataclass
from enum import StrEnum

from dovetail.boundaries import ACTOR, LEARNER, REPLAY, Side


class LinkKind(StrEnum):
    """How an edge is carried."""

    FUSED = "fused"
    """Inside one compiled program: no copy, no hand-over."""
    HANDOFF = "hand-off"
    """Between two programs of one worker: arrays change hands without a copy."""
    QUEUE = "queue"
    """Between two threads, by version and within bounds: arrays change hands without a copy."""
    SHARED_MEMORY = "shared memory"
    """Between two processes: arrays lie in memory that both see, a semaphore hands them over."""
    PIPE = "pipe"
    """Between this process and another of this machine: arrays are copied through a pipe."""
    OBJECT_STORE = "object store"
    """Between two processes of a cluster: one copy per node, whoever reads it there."""
    SOCKET = "socket"
    """Between plain Python and a server of another side: arrays lie in memory that both see, or
    travel inside the messages of a TCP connection."""


class WorkerKind(StrEnum):
    """What a worker is."""

    THREAD = "thread"
    PROCESS = "process"
    """A process of its own: steps environments that hold Python's lock, or hosts a side."""


@dataclass(frozen=True)
class Node:
    """A machine of a cluster, and what is free on it."""

    name: str
    id: str
    cpus: float
    gpus: float = 0.0
    others: tuple[tuple[str, float], ...] = ()
    """Resources that its owner named, with how much of each."""


@dataclass(frozen=True)
class Needs:
    """What a process takes of its node, and where it may be."""

    cpus: float = 1.0
    gpus: float = 0.0
    others: tuple[tuple[str, float], ...] = ()
    nodes: tuple[str, ...] = ()
    """The nodes it may be on; empty for any."""
    per_node: int | None = None
    """At most so many on one node."""


@dataclass(frozen=True)
class Cluster:
    """Several machines, and what the processes on them are given."""

    nodes: tuple[Node, ...]
    learners: Needs = Needs()
    actors: Needs = Needs()
    learner_devices: int = 1
    """Devices of one learner process."""


@dataclass(frozen=True)
class Resources:
    """What the machine has, or the cluster."""

    devices: int
    cores: int
    cluster: Cluster | None = None


@dataclass(frozen=True)
class Worker:
    """What hosts fragment instances."""

    name: str
    devices: tuple[int, ...] = ()
    """The devices its programs run on; several devices run replicas of the same programs."""
    kind: WorkerKind = WorkerKind.THREAD
    fused: bool = False
    """Whether what it hosts is compiled into as few programs as can be."""


@dataclass(frozen=True)
class Instance:
    """A fragment on a worker. The two halves of an unroll are `unroll.act` and `unroll.step`."""

    fragment: str
    worker: str
    envs: tuple[int, int] | None = None
    """The environments it serves, from the first up to (without) the second: a copy's share. None
    for all."""


@dataclass(frozen=True)
class Link:
    """What carries an edge from one instance to another."""

    boundary: str
    source: str
    target: str
    kind: LinkKind
    nbytes: int
    """Bytes per transfer."""
    transfers: int
    """Transfers per iteration, over all copies."""


@dataclass(frozen=True)
class Process:
    """A process on a node of a cluster, and the workers in it."""

    name: str
    workers: tuple[str, ...]
    learns: bool
    rank: int = 0
    """The learner process that it is, or that it works for: a learner over several processes has a
    part of its worker in each."""
    node: str = ""
    """Where it is to be; empty until there is room for it."""
    keeps: bool = False
    """Whether it hosts a side that serves the others, and does not act."""
    cpus: float = 1.0
    gpus: float = 0.0
    others: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Plan:
    """Where everything runs, and what carries what."""

    strategy: str
    algorithm: str
    env: str
    num_envs: int
    """Environments in all, over every actor and one seed."""
    copies: tuple[tuple[Side, int], ...]
    """How many copies each side has; those that act share the environments."""
    joined: int
    """How many acting copies' results make one update."""
    workers: tuple[Worker, ...]
    instances: tuple[Instance, ...]
    links: tuple[Link, ...] = ()
    staleness: int = 0
    """The most versions that a trajectory may be behind the weights that learn from it."""
    ordered: bool = True
    """Whether every actor gives each update its one unroll, made by weights that are exactly
    `staleness` old; otherwise the learner takes what has arrived."""
    prefetch: int = 0
    """How many updates ahead tables on workers of their own answer."""
    min_actors: int | None = None
    """On a cluster, how many actors must be there to begin; the others join when there is room.
    None for all of them."""
    processes: tuple[Process, ...] = ()
    """The processes of a cluster; none if all workers are in this one."""
    batch: int = 0
    """Environments that one call of acting serves where others step them; 0 for all."""
    batch_seconds: float | None = None
    """How long acting waits for that many before it serves those that are ready; None for as long
    as it takes."""
    notes: tuple[str, ...] = ()
    """One sentence for each choice that the strategy made."""

    @property
    def fused(self) -> bool:
        """Whether the whole iteration is one compiled program."""
        return all(link.kind is LinkKind.FUSED for link in self.links)

    def copies_of(self, *sides: Side) -> int:
        """How many copies there are of a side, or the most of several sides."""
        return max((count for side, count in self.copies if side in sides), default=1)

    @property
    def actors(self) -> int:
        """Copies of the actor side, each with an equal share of the environments."""
        return self.copies_of(ACTOR)

    @property
    def replicas(self) -> int:
        """Learner replicas, joined by `mean`."""
        return self.copies_of(LEARNER)

    @property
    def shards(self) -> int:
        """Equal parts in which a replay is kept."""
        return self.copies_of(REPLAY)

    @property
    def traced_copies(self) -> dict[Side, int]:
        """The copies that give to one update, for which its programs are traced."""
        return dict(self.copies) | {ACTOR: self.joined}

    @property
    def update_envs(self) -> int:
        """Environments whose steps make one update."""
        return self.num_envs * self.joined // self.actors

    @property
    def ranks(self) -> int:
        """Learner processes."""
        return max((process.rank for process in self.processes), default=0) + 1

    def worker(self, name: str) -> Worker:
        """The worker of that name."""
        return next(worker for worker in self.workers if worker.name == name)

    def instances_of(self, fragment: str) -> list[Instance]:
        """Where a fragment is."""
        return [instance for instance in self.instances if instance.fragment == fragment]

    def programs(self, worker: str) -> list[tuple[str, ...]]:
        """What is compiled together on a worker: its fragments, joined where fused links join
        them."""
        fragments = list(dict.fromkeys(i.fragment for i in self.instances if i.worker == worker))
        program = {fragment: {fragment} for fragment in fragments}
        for link in self.links:
            if link.kind is LinkKind.FUSED and link.source in program and link.target in program:
                joined = program[link.source] | program[link.target]
                program.update(dict.fromkeys(joined, joined))
        groups = [tuple(f for f in fragments if f in program[name]) for name in fragments]
        return list(dict.fromkeys(groups))
