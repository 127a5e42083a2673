"""Local: one process, environments on the host, acting and learning compiled.

The default for Gymnasium environments: what CleanRL and stable-baselines3 do, with the acting step
and the whole update each one compiled call.
"""

from dataclasses import dataclass

from dovetail.graph.ir import Graph
from dovetail.plan.ir import Plan, Resources, Worker
from dovetail.strategies.interface import Strategy, on_actor, on_environment, on_learner


@dataclass(frozen=True)
class Local(Strategy):
    """Host environments stepped from Python; the default for Gymnasium."""

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        """Everything on one worker, one program per fragment, arrays handed over in process."""
        everything = (0, self.num_envs)
        placed = on_learner(graph, "main") + on_actor(graph, "main", everything)
        return self.place(
            graph,
            [Worker("main", (0,))],
            placed + on_environment(graph, "main", everything),
            notes=("each fragment is a program of its own, run in turn by one thread",),
        )
