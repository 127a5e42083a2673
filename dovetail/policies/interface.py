"""What a distribution policy is: a small pure object that turns a graph into a plan.

A policy is a frozen dataclass; its fields are options, the strings beneath them their help. It sees
the graph and the machine's resources, never the algorithm, and writes down where things go.
"""

from dataclasses import dataclass
from typing import Protocol

from dovetail.graph.ir import Graph
from dovetail.plan.ir import Instance, Link, LinkKind, Plan


@dataclass(frozen=True)
class Resources:
    """What the machine has."""

    devices: int
    cores: int


class Policy(Protocol):
    """A distribution policy."""

    @property
    def envs(self) -> int:
        """Environments in all."""
        ...

    @property
    def replicas(self) -> int:
        """Into how many equal parts the environments are split; each part is traced alone."""
        ...

    @property
    def traced_envs(self) -> bool:
        """Whether it compiles the environment, and so wants a JAX one where there is a choice."""
        ...

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        """Places `graph` (one replica's) on `resources`, or refuses with a sentence."""
        ...


def on_one_worker(graph: Graph, worker: str) -> tuple[Instance, ...]:
    """Every fragment on the same worker."""
    return tuple(Instance(name, worker) for name in graph.fragments)


def links(graph: Graph, crossing: LinkKind, stepping: LinkKind) -> tuple[Link, ...]:
    """One link per edge, carried by `crossing`; acting and stepping joined by `stepping`."""
    acting = {unroll.name: f"{unroll.name}.act" for unroll in graph.unrolls}
    carried: list[Link] = []
    for edge in graph.edges:
        tail = acting.get(edge.source, edge.source)
        for target in edge.targets:
            head = acting.get(target, target)
            carried.append(Link(edge.boundary, tail, head, crossing, edge.nbytes, 1))
    for unroll in graph.unrolls:
        act, step = f"{unroll.name}.act", f"{unroll.name}.step"
        to_env, to_actor = unroll.per_step_bytes
        carried.append(Link("action", act, step, stepping, to_env, unroll.length))
        carried.append(Link("observation", step, act, stepping, to_actor, unroll.length))
    return tuple(carried)
