"""Where a run is: on this machine, or on a cluster that is joined for it."""

from collections.abc import Callable
from typing import Any

from dovetail.algorithm import Algorithm
from dovetail.clustering import (
    Parcel,
    Recipe,
    apart_in,
    cluster_runtime,
    connect,
    join,
    spawned_processes,
)
from dovetail.deployment import Deployment
from dovetail.envs.resolve import Env
from dovetail.errors import UserError
from dovetail.graph.taps import CannotTap
from dovetail.plan.ir import Plan
from dovetail.planning import Planned, plan_for
from dovetail.policies.interface import Policy
from dovetail.replay.data import DataSpec
from dovetail.runtime.interface import Runtime
from dovetail.runtime.local import LocalRuntime
from dovetail.settings import Settings
from dovetail.training.recording import not_recorded, recorded_steps
from dovetail.training.start import enable_compile_cache


class Place:
    """Where a run is: on this machine, or on a cluster that is joined for it."""

    def __init__(
        self,
        algorithm: Algorithm,
        env: Any,
        policy: Policy,
        deployment: Deployment | None,
        record: bool = False,
    ) -> None:
        """`env` is what the user gave; `record` says whether the run is to be recorded."""
        self._algorithm, self._env, self._policy = algorithm, env, policy
        self._wanted = recorded_steps if record else None
        self._deployment = deployment
        self._connection: Any = None

    def plan(
        self,
        env: Env,
        steps: int,
        settings: Settings,
        data: DataSpec | None = None,
        online: bool = True,
    ) -> Planned:
        """The plan of the run; a cluster is joined for it."""
        resources = None
        if self._deployment is not None:
            parcel = Parcel.of(self._recipe(steps), self._deployment)
            self._connection, resources = join(self._deployment, parcel)
        given = self._algorithm, env, self._policy, steps, resources, data, online
        try:
            planned = plan_for(*given, wanted=self._wanted)
        except UserError as error:
            if self._wanted is None or isinstance(error, CannotTap):
                raise
            plan_for(*given)  # has its own word to say
            raise not_recorded(self._policy) from error
        if self._wanted is not None and planned.plan.copies_of(planned.graph.home) > 1:
            raise not_recorded(self._policy)
        _refuse_seeds(planned.plan, settings)
        return planned

    def runtime(
        self, planned: Planned, steps: int, settings: Settings, tell: Callable[[str], None]
    ) -> Runtime:
        """What runs the plan."""
        if self._deployment is None:
            plan = planned.plan
            processes = spawned_processes(self._recipe(steps), plan, settings, tell)
            here = None
            if processes is not None:
                here = [worker.name for worker in plan.workers if worker.name not in apart_in(plan)]
            return LocalRuntime(
                planned.graph,
                plan,
                planned.env,
                settings.seeds,
                settings.patience,
                tell,
                processes,
                here,
            )
        if self._connection is None:
            tell("Starting a Ray cluster on this machine.")
            self._connection = connect(self._deployment, planned.plan)
        return cluster_runtime(
            self._recipe(steps), planned, self._deployment, self._connection, settings, tell
        )

    def _recipe(self, steps: int) -> Recipe:
        given = self._algorithm, self._env, self._policy, steps
        return Recipe(*given, enable_compile_cache, self._wanted)

    def close(self) -> None:
        """Leaves the cluster."""
        if self._connection is not None:
            self._connection.close()


def _refuse_seeds(plan: Plan, settings: Settings) -> None:
    if settings.seeds > 1 and not (plan.fused and plan.replicas == 1):
        raise UserError(
            f"--seeds {settings.seeds} trains several seeds as one compiled batch, which needs "
            f"--policy fused on one device; this plan is {plan.policy}'s, with "
            f"{plan.replicas} learner replicas."
        )
