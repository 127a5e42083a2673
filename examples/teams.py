"""Teams: several actors, each with several workers that step its environments, and one learner.

`ActorLearner` gives an actor one process of environments, `CentralInference` gives all processes
one actor. This strategy is in between: a few acting calls serve many processes, and no single actor
has to keep up with all of them.
"""

from dataclasses import dataclass

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
class Teams(Strategy):
    """Actors that each serve several environment workers, at a fixed lag."""

    actors: int = 2
    """Actors, each with an equal share of the environments (its team)."""
    workers: int = 2
    """Workers per actor that step environments, each with an equal share of the team."""
    staleness: int = 0
    """How many versions old the acting weights are; 0 is synchronous."""

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        """One worker for the learner, one per actor, and several for each actor's environments."""
        workers, placed = [Worker("learner", (0,))], on_learner(graph, "learner")
        for i, (first, last) in enumerate(shares(0, graph.num_envs, self.actors, "actors")):
            actor = f"actor-{i}"
            workers.append(Worker(actor, (0,)))
            placed += on_actor(graph, actor, (first, last))
            for j, share in enumerate(shares(first, last - first, self.workers, "workers")):
                name = f"environments-{i * self.workers + j}"
                workers.append(environment_worker(graph, name, processes=None))
                placed += on_environment(graph, name, share)
        return self.place(graph, workers, placed, staleness=self.staleness)
