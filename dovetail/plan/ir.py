"""The physical plan: fragment instances on workers, and the link that carries each edge.

A plan is data: it prints, serialises and can be checked; the runtime runs any plan and knows no
policy. Instances joined by fused links on one worker are compiled into one program.
"""

from dataclasses import dataclass
from enum import StrEnum


class LinkKind(StrEnum):
    """How an edge is carried."""

    FUSED = "fused"
    """Inside one compiled program: no copy, no hand-over."""
    HANDOFF = "hand-off"
    """Between two programs of one process: arrays change hands without a copy."""


@dataclass(frozen=True)
class Worker:
    """What hosts fragment instances."""

    name: str
    devices: tuple[int, ...]
    """The devices its programs run on; several devices run replicas of the same programs."""


@dataclass(frozen=True)
class Instance:
    """A fragment on a worker. The two halves of an unroll are `unroll.act` and `unroll.step`."""

    fragment: str
    worker: str


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
    """Transfers per iteration."""


@dataclass(frozen=True)
class Plan:
    """Where everything runs, and what carries what."""

    policy: str
    algorithm: str
    env: str
    num_envs: int
    """Environments in all, over every replica and one seed."""
    replicas: int
    """Learner replicas, each with num_envs / replicas environments, joined by `mean`."""
    workers: tuple[Worker, ...]
    instances: tuple[Instance, ...]
    links: tuple[Link, ...]
    notes: tuple[str, ...] = ()
    """One sentence for each choice that the policy made."""

    def worker_of(self, fragment: str) -> str:
        """The worker that hosts a fragment."""
        return next(i.worker for i in self.instances if i.fragment == fragment)

    def programs(self, worker: str) -> list[tuple[str, ...]]:
        """What is compiled together on a worker: its fragments, joined where fused links join
        them."""
        fragments = [i.fragment for i in self.instances if i.worker == worker]
        program = {fragment: {fragment} for fragment in fragments}
        for link in self.links:
            if link.kind is LinkKind.FUSED and link.source in program and link.target in program:
                joined = program[link.source] | program[link.target]
                program.update(dict.fromkeys(joined, joined))
        groups = [tuple(f for f in fragments if f in program[name]) for name in fragments]
        return list(dict.fromkeys(groups))
