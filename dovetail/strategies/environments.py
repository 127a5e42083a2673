"""Environments: environments on dedicated workers, the rest on one device; MSRL, MALib.

For slow environments: they step in parallel, and one call of acting serves all of them. The result
is the same as in one process.
"""

from dataclasses import dataclass

from dovetail.errors import check_option
from dovetail.graph.ir import Graph
from dovetail.plan.ir import Plan, Resources, Worker
from dovetail.strategies.interface import (
    Strategy,
    environment_worker,
    on_actor,
    on_environment,
    on_learner,
    shares,
)


@dataclass(frozen=True, kw_only=True)
class Environments(Strategy):
    """Environments on dedicated workers; acting and learning alternate on one device."""

    workers: int = 2
    """Workers that step them, each with an equal share."""
    processes: bool | None = None
    """Whether the workers are processes. By default yes if environments are written in Python."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("workers", self.workers, self.workers >= 1, "1 or more")

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        """Learner and actor share a worker; the environments have the others."""
        everything = (0, graph.num_envs)
        workers = [Worker("main", (0,))]
        placed = on_learner(graph, "main") + on_actor(graph, "main", everything)
        for i, share in enumerate(shares(0, graph.num_envs, self.workers, "workers")):
            workers.append(environment_worker(graph, f"environments-{i}", self.processes))
            placed += on_environment(graph, f"environments-{i}", share)
        return self.place(graph, workers, placed)
