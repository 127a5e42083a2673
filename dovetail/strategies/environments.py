"""Environments: environments on dedicated workers, everything else on one device; MSRL's and
MALib's strategy of that name.

For environments whose steps are slow: they step side by side, all served by one call of acting.
The result is that of one process.
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


@dataclass(frozen=True)
class Environments(Strategy):
    """Environments in workers of their own; acting and learning in turn on one device."""

    workers: int = 2
    """Workers that step them, each with an equal share."""
    processes: bool | None = None
    """Whether the workers are processes. By default where environments are written in Python."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("workers", self.workers, self.workers >= 1, "1 or more")

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        """Learner and actor on one worker, the environments on the others."""
        everything = (0, self.num_envs)
        workers = [Worker("main", (0,))]
        placed = on_learner(graph, "main") + on_actor(graph, "main", everything)
        for i, share in enumerate(shares(0, self.num_envs, self.workers, "workers")):
            workers.append(environment_worker(graph, f"environments-{i}", self.processes))
            placed += on_environment(graph, f"environments-{i}", share)
        return self.place(graph, workers, placed)
