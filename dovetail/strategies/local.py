"""Local: one process, host environments, compiled acting and learning; CleanRL, SB3.

The default for Gymnasium environments. The acting step and the whole update are one compiled call
each.
"""

from dataclasses import dataclass

from dovetail.graph.ir import Graph
from dovetail.plan.ir import Plan, Resources, Worker
from dovetail.strategies.interface import Strategy, on_actor, on_environment, on_learner


@dataclass(frozen=True, kw_only=True)
class Local(Strategy):
    """Host environments stepped from Python; the default for Gymnasium."""

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        """Everything runs on one worker, with one program per fragment and hand-off links."""
        everything = (0, graph.num_envs)
        placed = on_learner(graph, "main") + on_actor(graph, "main", everything)
        return self.place(
            graph,
            [Worker("main", (0,))],
            placed + on_environment(graph, "main", everything),
            notes=("each fragment is a program of its own, run in turn by one thread",),
        )
