"""CentralInference: environment workers only step, acting is batched across them; SEED RL.

One thread acts for all environments. It waits until a batch is ready or a time limit passes, then
serves the environments that are ready. By default a batch covers three quarters of the environment
workers, so that the others step meanwhile. Recurrent carries stay with the acting worker.
"""

from dataclasses import dataclass

from dovetail.errors import UserError, check_option
from dovetail.graph.ir import Graph
from dovetail.plan.ir import Plan, Resources, Worker
from dovetail.strategies.interface import (
    Strategy,
    environment_worker,
    on_actor,
    on_environment,
    on_learner,
    shares,
    staleness_of,
)


@dataclass(frozen=True, kw_only=True)
class CentralInference(Strategy):
    """Environments on dedicated workers; acting batched on one worker beside the learner."""

    workers: int = 4
    """Workers that step them, each with an equal share; best twice as many as can step at once."""
    batch: int | None = None
    """Environments per call of acting; those of 3/4 of the workers unless given."""
    wait: float = 0.01
    """Seconds that acting waits for a full batch before it serves a partial one."""
    staleness: int | None = None
    """Staleness of the acting weights, in versions; 0, the default, is synchronous."""
    processes: bool | None = None
    """Whether the workers are processes. By default yes if environments are written in Python."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("workers", self.workers, self.workers >= 1, "1 or more")
        check_option("wait", self.wait, self.wait >= 0, "0 or more seconds")
        bound = self.staleness
        check_option("staleness", bound, bound is None or bound >= 0, "0 or more")

    def _served(self, envs: int) -> int:
        """Environments per call of acting, out of `envs`; those of whole workers."""
        first, last = shares(0, envs, self.workers, "workers")[0]
        share = last - first
        others = max(1, self.workers // 4)
        size = share * max(1, self.workers - others) if self.batch is None else self.batch
        if size < 1 or size > envs or size % share:
            raise UserError(
                f"A batch of {size} environments is not that of whole workers, of which each has "
                f"{share}: choose a multiple of {share} up to {envs} (--batch)."
            )
        return size

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        """One worker for the learner, one for acting, and the environment workers."""
        bound = staleness_of(graph, self.staleness, 0)
        everything = (0, graph.num_envs)
        workers = [Worker("learner", (0,)), Worker("inference", (0,))]
        placed = on_learner(graph, "learner") + on_actor(graph, "inference", everything)
        for i, share in enumerate(shares(0, graph.num_envs, self.workers, "workers")):
            workers.append(environment_worker(graph, f"environments-{i}", self.processes))
            placed += on_environment(graph, f"environments-{i}", share)
        return self.place(
            graph,
            workers,
            placed,
            staleness=bound,
            batch=self._served(graph.num_envs),
            batch_seconds=self.wait,
        )
