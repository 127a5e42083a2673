"""ActorLearner: N actors with their own copy of the weights, one learner; IMPALA, Acme, Ape-X.

With a staleness bound of 0, actors and learner wait for each other, and the result is the same as
in one process. With a larger bound, actors keep acting while the learner learns. The learner takes
unrolls as they arrive, so a slow actor or a long episode does not block it. No actor starts an
unroll that would exceed the bound by the time it is used.
"""

from dataclasses import dataclass

from dovetail.boundaries import REPLAY
from dovetail.errors import UserError, check_option
from dovetail.graph.ir import Graph
from dovetail.plan.ir import Plan, Resources, Worker, WorkerKind
from dovetail.strategies.interface import (
    Strategy,
    check_min_actors,
    environment_worker,
    is_traced,
    on_actor,
    on_environment,
    on_learner,
    on_replay,
    shares,
    staleness_of,
)


@dataclass(frozen=True, kw_only=True)
class ActorLearner(Strategy):
    """Actors in separate threads, one learner; synchronous or asynchronous."""

    actors: int = 2
    """Threads that act, each with an equal share of the environments."""
    staleness: int | None = None
    """Maximum staleness of a trajectory, in versions; 0 is synchronous. 2 unless given, or as much
    as the algorithm tolerates."""
    processes: bool | None = None
    """Whether each actor's environments step in a separate process. By default yes if they are
    written in Python and the actors are threads of one process."""

    shards: int = 0
    """Workers that hold the replay, each an equal part with the experience of its own actors; 0
    keeps it with the learner."""
    prefetch: int | None = None
    """Number of updates for which such workers sample ahead. 1 unless given, or 0 if staleness
    is 0."""
    min_actors: int | None = None
    """On a cluster, the number of actors required to start; the others join as resources become
    free. All unless given; `--actors 2..8` sets both."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("actors", self.actors, self.actors >= 1, "1 or more")
        check_min_actors(self.min_actors, self.actors, "actors")
        bound = self.staleness
        check_option("staleness", bound, bound is None or bound >= 0, "0 or more")
        check_option("shards", self.shards, self.shards >= 0, "0 or more")
        ahead = self.prefetch
        check_option("prefetch", ahead, ahead is None or ahead >= 0, "0 or more")
        if self.shards and self.actors % self.shards:
            raise UserError(
                f"{self.actors} actors cannot be split evenly among {self.shards} shards: choose a "
                f"multiple of {self.shards} (--actors)."
            )

    @property
    def traced_envs(self) -> bool:
        """Prefers host environments where both kinds exist."""
        return False

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        """One worker for the learner, one per shard and actor, one per environment process."""
        bound = staleness_of(graph, self.staleness, 2)
        if self.shards and REPLAY not in graph.sides:
            raise UserError(
                f"--shards {self.shards} keeps a replay in shards, but {graph.algorithm} has none: "
                f"leave --shards out."
            )
        workers, placed = [Worker("learner", (0,))], on_learner(graph, "learner")
        for i, share in enumerate(
            shares(0, graph.num_envs, self.shards, "shards") if self.shards else ()
        ):
            workers.append(Worker(f"replay-{i}", (0,)))
            placed += on_replay(graph, f"replay-{i}", share)
        processes = self.processes
        if processes is None and resources.cluster is not None:
            processes = False  # there each actor already has its own process
        for i, share in enumerate(shares(0, graph.num_envs, self.actors, "actors")):
            actor, steps = f"actor-{i}", f"actor-{i}"
            workers.append(Worker(actor, (0,), fused=is_traced(graph)))
            stepping = environment_worker(graph, f"environments-{i}", processes)
            if stepping.kind is WorkerKind.PROCESS:
                workers.append(stepping)
                steps = stepping.name
            placed += on_actor(graph, actor, share) + on_environment(graph, steps, share)
        ahead = (1 if bound else 0) if self.prefetch is None else self.prefetch
        return self.place(
            graph,
            workers,
            placed,
            staleness=bound,
            prefetch=ahead if self.shards else 0,
            min_actors=self.min_actors,
            ordered=bound == 0,  # otherwise the learner takes unrolls as they arrive
        )
