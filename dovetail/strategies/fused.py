"""Fused: environment, acting and learning in one compiled program; Podracer's Anakin.

The fastest way to run a JAX environment: one dispatch runs many iterations, and nothing leaves the
device in between. With several devices, each runs its share of the environments, and `mean` becomes
an all-reduce.
"""

from dataclasses import dataclass

from dovetail.errors import UserError
from dovetail.graph.ir import Graph, Python
from dovetail.plan.ir import Instance, Plan, Resources, Worker
from dovetail.strategies.interface import (
    Replicated,
    is_traced,
    on_actor,
    on_environment,
    on_side,
    refuse_too_many_devices,
    shares,
)


@dataclass(frozen=True, kw_only=True)
class Fused(Replicated):
    """One compiled program for everything; needs a JAX environment."""

    @property
    def traced_envs(self) -> bool:
        """True: the environment is part of the program."""
        return True

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        """Everything runs on one worker as one program."""
        if not is_traced(graph):
            raise UserError(
                f"Fused compiles the environment into its program, but {graph.env} steps on the "
                f"host: use --strategy local, or a JAX environment (see `dovetail list`)."
            )
        python = next((node for node in graph.nodes if isinstance(node, Python)), None)
        if python is not None and python.reach is not None:
            raise UserError(
                f"Fused compiles everything into one program, but the {python.reach.side} is kept "
                f"by {python.reach.place}: use --strategy local, or --replay learner."
            )
        if python is not None:
            raise UserError(
                f"Fused compiles everything into one program, but {python.name} runs plain Python "
                f"({python.where}): use --strategy local."
            )
        if self.sides:
            raise UserError(
                f"--sides {','.join(self.sides)} asks for workers of their own, but Fused has one "
                f"program for everything: leave --sides out, or use --strategy local."
            )
        refuse_too_many_devices(self.devices, resources, "Fused")
        return self.place(
            graph,
            [Worker("main", tuple(range(self.devices)), fused=True)],
            compiled_together(graph, "main", self.devices),
            notes=("the whole iteration is one program, so many run per dispatch",),
        )


def compiled_together(graph: Graph, worker: str, devices: int) -> list[Instance]:
    """Places everything on one worker, with a copy of the actor side for each device."""
    others = [side for side in graph.sides if side not in graph.acting]
    placed = [instance for side in others for instance in on_side(graph, side, worker)]
    # Instances of one worker: `shard_map` splits the program, not the runtime.
    for share in shares(0, graph.num_envs, devices, "devices"):
        placed += on_actor(graph, worker, share) + on_environment(graph, worker, share)
    return placed
