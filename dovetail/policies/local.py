"""Local: one process, environments on the host, acting and learning compiled.

The default for Gymnasium environments: what CleanRL and stable-baselines3 do, with the acting step
and the whole update each one compiled call.
"""

from dataclasses import dataclass

from dovetail.errors import check_option
from dovetail.graph.ir import Graph
from dovetail.plan.ir import LinkKind, Plan, Worker
from dovetail.policies.interface import Resources, links, on_one_worker


@dataclass(frozen=True)
class Local:
    """Host environments stepped from Python; the default for Gymnasium."""

    envs: int = 8
    """Environments stepped side by side."""

    def __post_init__(self) -> None:
        check_option("envs", self.envs, self.envs >= 1, "1 or more")

    @property
    def replicas(self) -> int:
        """One learner."""
        return 1

    @property
    def traced_envs(self) -> bool:
        """Host environments are preferred where there is a choice."""
        return False

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        """Everything on one worker, one program per fragment, arrays handed over in process."""
        return Plan(
            policy="local",
            algorithm=graph.algorithm,
            env=graph.env,
            num_envs=self.envs,
            replicas=1,
            workers=(Worker("main", (0,)),),
            instances=on_one_worker(graph, "main"),
            links=links(graph, crossing=LinkKind.HANDOFF, stepping=LinkKind.HANDOFF),
            notes=("environments step on the host, so each fragment is a program of its own",),
        )
