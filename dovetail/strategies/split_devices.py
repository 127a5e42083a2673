"""SplitDevices: actor threads on some devices, the learner sharded over the others; Sebulba.

By default actors run one update ahead: while the learner learns from one round of unrolls, they
collect the next. Their weights are exactly `staleness` versions old, so a run is reproducible bit
for bit. With a staleness of 0, actors and learner alternate.
"""

from dataclasses import dataclass

from dovetail.errors import UserError, check_option
from dovetail.graph.ir import Graph
from dovetail.plan.ir import Plan, Resources, Worker
from dovetail.strategies.interface import (
    Strategy,
    is_traced,
    on_actor,
    on_environment,
    on_learner,
    refuse_too_many_devices,
    shares,
    staleness_of,
)


@dataclass(frozen=True, kw_only=True)
class SplitDevices(Strategy):
    """Actors on some devices, learners on the others, at a fixed lag."""

    actor_devices: int = 1
    """Devices that act: the first ones."""
    learner_devices: int = 1
    """Devices that learn, each from an equal share: those after the actors' devices."""
    threads: int = 2
    """Actor threads per device: one acts while the environments of another step."""
    staleness: int | None = None
    """Staleness of the acting weights, in versions: 1 unless given, or 0 if the algorithm does not
    tolerate it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("actor_devices", "learner_devices", "threads"):
            check_option(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        bound = self.staleness
        check_option("staleness", bound, bound is None or bound >= 0, "0 or more")
        if self._actors % self.learner_devices:
            raise UserError(
                f"{self._actors} actor threads cannot be split evenly among "
                f"{self.learner_devices} learner devices: choose a multiple of "
                f"{self.learner_devices} (--actor-devices × --threads)."
            )

    @property
    def _actors(self) -> int:
        return self.actor_devices * self.threads

    @property
    def devices_wanted(self) -> int:
        """The devices of actors and learners."""
        return self.actor_devices + self.learner_devices

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        """Actors take the first devices; the learner spans the rest."""
        refuse_too_many_devices(self.devices_wanted, resources, "SplitDevices")
        learners = tuple(range(self.actor_devices, self.devices_wanted))
        workers, placed = [Worker("learner", learners)], on_learner(graph, "learner")
        for i, share in enumerate(shares(0, graph.num_envs, self._actors, "actor threads")):
            device = i // self.threads
            workers.append(Worker(f"actor-{i}", (device,), fused=is_traced(graph)))
            placed += on_actor(graph, f"actor-{i}", share)
            placed += on_environment(graph, f"actor-{i}", share)
        bound = staleness_of(graph, self.staleness, 1)
        return self.place(graph, workers, placed, staleness=bound)
