"""DataParallel: N × (actor + learner), gradients all-reduced; DD-PPO, MSRL's MultiLearner.

Each device acts and learns on its own share of the environments. `mean` is one XLA collective,
without a copy to the host. JAX environments are compiled with everything else into one program; for
host environments, each device has a thread that steps them.
"""

from dataclasses import dataclass

from dovetail.graph.ir import Graph
from dovetail.plan.ir import Plan, Resources, Worker
from dovetail.strategies.fused import compiled_together
from dovetail.strategies.interface import (
    Replicated,
    is_traced,
    on_actor,
    on_environment,
    on_learner,
    refuse_too_many_devices,
    shares,
)


@dataclass(frozen=True, kw_only=True)
class DataParallel(Replicated):
    """Every device acts and learns on its own environments; gradients are all-reduced."""

    devices: int = 2
    """Devices that each take an equal share of the environments."""

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        """The learner spans all devices, with an actor on each."""
        refuse_too_many_devices(self.devices, resources, "DataParallel")
        devices = tuple(range(self.devices))
        # Sides on their own workers cannot be part of the one program.
        if is_traced(graph) and not self.sides:
            everything = compiled_together(graph, "replicas", self.devices)
            return self.place(graph, [Worker("replicas", devices, fused=True)], everything)
        workers, placed = [Worker("learner", devices)], on_learner(graph, "learner")
        for i, share in enumerate(shares(0, graph.num_envs, self.devices, "devices")):
            workers.append(Worker(f"actor-{i}", (i,)))
            placed += on_actor(graph, f"actor-{i}", share)
            placed += on_environment(graph, f"actor-{i}", share)
        return self.place(graph, workers, placed)
