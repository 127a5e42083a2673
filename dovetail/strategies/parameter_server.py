"""ParameterServer: workers send gradients, one master applies them; A3C, MSRL's Central.

The algorithm computes gradients on the actor side and sends them with `reduce`. In synchronous mode
the master averages one gradient from every worker per update. In asynchronous mode it applies each
gradient as it arrives.
"""

from dataclasses import dataclass

from dovetail.errors import UserError, check_option
from dovetail.graph.ir import Graph
from dovetail.graph.taps import RECORD
from dovetail.plan.ir import Plan, Resources, Worker
from dovetail.strategies.interface import (
    Strategy,
    check_min_actors,
    is_traced,
    on_actor,
    on_environment,
    on_learner,
    shares,
)


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Strategy):
    """Gradients from many workers, applied by one master."""

    workers: int = 2
    """Workers that act and compute gradients, each with an equal share of the environments."""
    synchronous: bool = False
    """Whether the master averages one gradient per worker instead of applying each on arrival."""
    staleness: int | None = None
    """Maximum staleness of a gradient when it is applied, in versions, if not synchronous. Twice
    the number of workers unless given."""

    min_actors: int | None = None
    """On a cluster, the number of workers required to start; the others join as resources become
    free. All unless given; `--workers 2..8` sets both."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("workers", self.workers, self.workers >= 1, "1 or more")
        check_min_actors(self.min_actors, self.workers, "workers")
        bound = self.staleness
        check_option("staleness", bound, bound is None or bound >= 1, "1 or more")
        if self.synchronous and bound is not None:
            raise UserError(
                f"--staleness {bound} is for gradients that are applied as they come, but "
                f"--synchronous averages new ones: leave one out."
            )

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        """One worker for the master, and the workers that compute gradients."""
        # A tap (`RECORD`) sends trajectories too.
        whole = ("gather", "insert", RECORD)
        sent = next((edge for edge in graph.edges if edge.boundary in whole), None)
        if sent is not None:
            raise UserError(
                f"ParameterServer's workers send gradients (rl.reduce), but {graph.algorithm} "
                f"sends whole trajectories (rl.{sent.boundary} at {sent.where}): use --strategy "
                f"actor-learner, or an algorithm such as a3c."
            )
        workers, placed = [Worker("master", (0,))], on_learner(graph, "master")
        for i, share in enumerate(shares(0, graph.num_envs, self.workers, "workers")):
            workers.append(Worker(f"worker-{i}", (0,), fused=is_traced(graph)))
            placed += on_actor(graph, f"worker-{i}", share)
            placed += on_environment(graph, f"worker-{i}", share)
        bound = 0 if self.synchronous else self.staleness or 2 * self.workers
        return self.place(
            graph,
            workers,
            placed,
            self.workers if self.synchronous else 1,
            staleness=bound,
            min_actors=self.min_actors,
            ordered=self.synchronous,
        )
