"""Fused: environment, acting and learning in one compiled program; Podracer's Anakin.

The fastest way to run an environment written in JAX: many iterations per dispatch, nothing leaves
the device between them. Over several devices each runs its share of the environments, and `mean`
becomes an all-reduce.
"""

from dataclasses import dataclass

from dovetail.errors import UserError, check_option
from dovetail.graph.ir import Graph
from dovetail.plan.ir import LinkKind, Plan, Worker
from dovetail.policies.interface import Resources, links, on_one_worker


@dataclass(frozen=True)
class Fused:
    """One compiled program for everything; needs a JAX environment."""

    envs: int = 64
    """Environments stepped side by side, over all devices."""
    devices: int = 1
    """Devices that each take an equal share of the environments."""

    def __post_init__(self) -> None:
        check_option("envs", self.envs, self.envs >= 1, "1 or more")
        check_option("devices", self.devices, self.devices >= 1, "1 or more")

    @property
    def replicas(self) -> int:
        """One learner replica per device."""
        return self.devices

    @property
    def traced_envs(self) -> bool:
        """The environment is compiled in."""
        return True

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        """Everything on one worker, joined by fused links."""
        hosted = next((u for u in graph.unrolls if u.step.program is None), None)
        if hosted is not None:
            raise UserError(
                f"Fused compiles the environment into its program, but {graph.env} steps on the "
                f"host: use --policy local, or a JAX environment (see `dovetail list`)."
            )
        if self.devices > resources.devices:
            raise UserError(
                f"Fused was asked for {self.devices} devices, but this machine has "
                f"{resources.devices}: lower --devices, or on a CPU set XLA_FLAGS="
                f"--xla_force_host_platform_device_count={self.devices}."
            )
        return Plan(
            policy="fused",
            algorithm=graph.algorithm,
            env=graph.env,
            num_envs=self.envs,
            replicas=self.devices,
            workers=(Worker("main", tuple(range(self.devices))),),
            instances=on_one_worker(graph, "main"),
            links=links(graph, crossing=LinkKind.FUSED, stepping=LinkKind.FUSED),
            notes=("the whole iteration is one program, so many run per dispatch",),
        )
