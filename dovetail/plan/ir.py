"""The physical plan: fragment instances on workers, and the link that carries each edge.

A plan is data: it can be printed, serialized and checked. The runtime runs any plan and knows
nothing about strategies. A side may have several copies, each with a share of the environments or
of a batch. Each of its fragments then has one instance per copy, and one link describes the
transfers of all of them. Copies that learn together are devices of one worker.
"""

from dataclasses import dataclass
from enum import StrEnum

from dovetail.boundaries import ACTOR, LEARNER, REPLAY, Side


class LinkKind(StrEnum):
    """The transport of an edge."""

    FUSED = "fused"
    """Inside one compiled program: nothing is transferred."""
    HANDOFF = "hand-off"
    """Between two programs of one worker: arrays are passed without a copy."""
    QUEUE = "queue"
    """Between two threads: a bounded queue of versioned messages, without a copy."""
    SHARED_MEMORY = "shared memory"
    """Between two processes: arrays live in shared memory, a semaphore signals them."""
    PIPE = "pipe"
    """Between this process and another on this machine: arrays are copied through a pipe."""
    OBJECT_STORE = "object store"
    """Between two processes of a cluster: one copy per node, however many read it there."""
    SOCKET = "socket"
    """Between plain Python and the server of another side: arrays live in shared memory, or travel
    in the messages of a TCP connection."""


class WorkerKind(StrEnum):
    """Whether a worker is a thread or a process."""

    THREAD = "thread"
    PROCESS = "process"
    """Steps environments that hold the GIL, or hosts a side in a separate process."""


@dataclass(frozen=True)
class Node:
    """A machine of a cluster and its free resources."""

    name: str
    id: str
    cpus: float
    gpus: float = 0.0
    others: tuple[tuple[str, float], ...] = ()
    """Custom resources: (name, amount)."""


@dataclass(frozen=True)
class Needs:
    """The resources a process reserves, and the nodes it may run on."""

    cpus: float = 1.0
    gpus: float = 0.0
    others: tuple[tuple[str, float], ...] = ()
    nodes: tuple[str, ...] = ()
    """The allowed nodes; empty for any."""
    per_node: int | None = None
    """Maximum number of such processes per node."""


@dataclass(frozen=True)
class Cluster:
    """The machines of a cluster, and the needs of learner and actor processes."""

    nodes: tuple[Node, ...]
    learners: Needs = Needs()
    actors: Needs = Needs()
    learner_devices: int = 1
    """Devices per learner process."""


@dataclass(frozen=True)
class Resources:
    """The resources of the machine or the cluster, as strategies see them."""

    devices: int
    cores: int
    cluster: Cluster | None = None


@dataclass(frozen=True)
class Worker:
    """Hosts fragment instances."""

    name: str
    devices: tuple[int, ...] = ()
    """The devices of its programs; with several, each runs a replica of the same programs."""
    kind: WorkerKind = WorkerKind.THREAD
    fused: bool = False
    """Whether its fragments are compiled into as few programs as possible."""


@dataclass(frozen=True)
class Instance:
    """A fragment on a worker. The halves of an unroll are `unroll.act` and `unroll.step`."""

    fragment: str
    worker: str
    envs: tuple[int, int] | None = None
    """Its share of the environments, as a half-open range [first, last); None for all."""


@dataclass(frozen=True)
class Link:
    """Carries an edge from one instance to another."""

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
    """The index of its learner process. A learner that spans several processes has a part of its
    worker in each; an actor process has the rank of its learner."""
    node: str = ""
    """The node it runs on; empty while it waits for free resources."""
    keeps: bool = False
    """Whether it hosts a side that neither learns nor acts, such as a replay."""
    cpus: float = 1.0
    gpus: float = 0.0
    others: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Plan:
    """The placement of every fragment and the link of every edge."""

    strategy: str
    algorithm: str
    env: str
    num_envs: int
    """Total number of environments, over all actors of one seed."""
    copies: tuple[tuple[Side, int], ...]
    """Number of copies of each side; acting copies share the environments."""
    joined: int
    """Number of acting copies whose results make one update."""
    workers: tuple[Worker, ...]
    instances: tuple[Instance, ...]
    links: tuple[Link, ...] = ()
    staleness: int = 0
    """Maximum learner version minus trajectory version."""
    ordered: bool = True
    """Whether every actor contributes one unroll to each update, with weights of exactly this
    staleness; otherwise the learner takes unrolls as they arrive, up to the bound."""
    prefetch: int = 0
    """How many updates ahead a replay on its own workers samples."""
    min_actors: int | None = None
    """On a cluster, the number of actors required to start; the others join as resources become
    free. None for all of them."""
    processes: tuple[Process, ...] = ()
    """The processes of a cluster; empty if all workers live in this process."""
    batch: int = 0
    """Environments per call of acting where other workers step them; 0 for all."""
    batch_seconds: float | None = None
    """Seconds that acting waits for a full batch before it serves a partial one; None to always
    wait."""
    notes: tuple[str, ...] = ()
    """One sentence for each choice of the strategy and the passes."""

    @property
    def fused(self) -> bool:
        """Whether the whole iteration is one compiled program."""
        return all(link.kind is LinkKind.FUSED for link in self.links)

    def copies_of(self, *sides: Side) -> int:
        """Number of copies of a side; the maximum over several sides."""
        return max((count for side, count in self.copies if side in sides), default=1)

    @property
    def actors(self) -> int:
        """Number of copies of the actor side, each with an equal share of the environments."""
        return self.copies_of(ACTOR)

    @property
    def replicas(self) -> int:
        """Number of learner replicas, synchronized by `mean`."""
        return self.copies_of(LEARNER)

    @property
    def shards(self) -> int:
        """Number of equal parts of the replay."""
        return self.copies_of(REPLAY)

    @property
    def traced_copies(self) -> dict[Side, int]:
        """The copies that take part in one update; programs are traced for these numbers."""
        return dict(self.copies) | {ACTOR: self.joined}

    @property
    def update_envs(self) -> int:
        """Number of environments that feed one update."""
        return self.num_envs * self.joined // self.actors

    @property
    def ranks(self) -> int:
        """Number of learner processes."""
        return max((process.rank for process in self.processes), default=0) + 1

    def worker(self, name: str) -> Worker:
        """The worker with this name."""
        return next(worker for worker in self.workers if worker.name == name)

    def instances_of(self, fragment: str) -> list[Instance]:
        """The instances of a fragment."""
        return [instance for instance in self.instances if instance.fragment == fragment]

    def programs(self, worker: str) -> list[tuple[str, ...]]:
        """The programs of a worker, each a group of fragments connected by fused links."""
        fragments = list(dict.fromkeys(i.fragment for i in self.instances if i.worker == worker))
        program = {fragment: {fragment} for fragment in fragments}
        for link in self.links:
            if link.kind is LinkKind.FUSED and link.source in program and link.target in program:
                # Merges two groups: all their members share the set from here on.
                joined = program[link.source] | program[link.target]
                program.update(dict.fromkeys(joined, joined))
        groups = [tuple(f for f in fragments if f in program[name]) for name in fragments]
        return list(dict.fromkeys(groups))
