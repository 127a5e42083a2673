"""Where a run executes: on this machine, or on a cluster that it joins."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.algorithm import Algorithm
from dovetail.envs.resolve import Env
from dovetail.errors import UserError
from dovetail.graph.taps import CannotTap
from dovetail.hosts.deployment import Deployment
from dovetail.plan.ir import Plan
from dovetail.replay.data import DataSpec
from dovetail.run.settings import Settings
from dovetail.runtime.interface import Runtime
from dovetail.runtime.local import LocalRuntime
from dovetail.strategies.interface import Strategy
from dovetail.training.cluster import (
    Recipe,
    UserFiles,
    apart_in,
    cluster_runtime,
    connect,
    join,
    spawned_processes,
)
from dovetail.training.planning import Planned, plan_for
from dovetail.training.recording import not_recorded, recorded_steps
from dovetail.training.replay_servers import (
    ServedReplay,
    Servers,
    connected,
    form_of,
    orders,
    refuse_unreachable,
    refuse_without,
    samples_each,
    with_keys,
)
from dovetail.training.start import enable_compile_cache


class Place:
    """Plans and starts a run on this machine or on a cluster. Close it."""

    def __init__(
        self,
        algorithm: Algorithm,
        env: Any,
        strategy: Strategy,
        deployment: Deployment | None,
        record: bool = False,
        replay: ServedReplay | None = None,
    ) -> None:
        """`env` is the user's argument. `record` says whether to record the run; `replay` names the
        servers that hold its replay, if any."""
        self._algorithm, self._env, self._strategy = algorithm, env, strategy
        self._wanted = recorded_steps if record else None
        self._deployment, self._replay = deployment, replay
        self.served = None if replay is None else with_keys(replay.served(deployment is not None))
        """The servers as the task sees them; None without served replay."""
        self._servers: Any = None
        self._data: DataSpec | None = None
        self._online = True
        self._info: tuple[str, ...] = ()
        self._connection: Any = None

    def plan(
        self,
        env: Env,
        steps: int,
        settings: Settings,
        data: DataSpec | None = None,
        online: bool = True,
    ) -> Planned:
        """Plans the run; joins the cluster first, if there is one."""
        resources, served = None, self.served
        self._data, self._online, self._info = data, online, env.spec.info
        if self._replay is not None:
            self._replay.refuse_elsewhere(self._deployment is not None)
        if self._deployment is not None:
            user_files = UserFiles.of(self._recipe(steps), self._deployment)
            self._connection, resources = join(self._deployment, user_files)
        given = self._algorithm, env, self._strategy, steps, resources, data, online
        try:
            planned = plan_for(*given, wanted=self._wanted, served=self.served)
        except UserError as error:
            if self._wanted is None or isinstance(error, CannotTap):
                raise
            # If the plan also fails without the tap, raise that error: recording is not the cause.
            plan_for(*given, served=self.served)
            raise not_recorded(self._strategy) from error
        if self._wanted is not None and planned.plan.copies_of(planned.graph.home) > 1:
            raise not_recorded(self._strategy)
        _refuse_seeds(planned.plan, settings)
        if served is not None:
            refuse_without(planned.graph)
        if served is not None and served.addresses:
            refuse_unreachable(planned.graph)
        return planned

    def runtime(
        self,
        planned: Planned,
        steps: int,
        settings: Settings,
        tell: Callable[[str], None],
        folder: Path,
    ) -> Runtime:
        """Creates the runtime of the plan; replay servers store their files in `folder`."""
        if self._deployment is not None and self._connection is None:
            tell("Starting a Ray cluster on this machine.")
            self._connection = connect(self._deployment, planned.plan)
        planned = self._with_servers(planned, tell, folder)
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
        return cluster_runtime(
            self._recipe(steps), planned, self._deployment, self._connection, settings, tell
        )

    def _with_servers(self, planned: Planned, tell: Callable[[str], None], folder: Path) -> Planned:
        """Starts the replay servers, if any; returns the plan with their addresses in its graph."""
        form, options = form_of(planned.graph), self._replay
        if form is None or options is None or options.at:
            return planned
        wanted, rate = orders(form, options, folder), options.samples_per_insert
        each = samples_each(planned.graph)
        if rate is not None and abs(rate - each) > 0.01 * each:
            tell(
                f"The replay is held to {rate:g} samples per insert, and this training alone takes "
                f"{each:g}: unless others share it, one side will wait in vain."
            )
        if self._deployment is None:
            self._servers = Servers(wanted, tell)
        else:
            from dovetail.training.cluster_replay_servers import RayServers

            self._servers = RayServers(wanted, folder / "key", tell)
        assert self.served is not None
        self.served = replace(self.served, addresses=self._servers.addresses)
        return replace(planned, graph=connected(planned.graph, self.served.addresses))

    def _recipe(self, steps: int) -> Recipe:
        return Recipe(
            *(self._algorithm, self._env, self._strategy, steps, enable_compile_cache),
            wanted=self._wanted,
            served=self.served,
            data=self._data,
            online=self._online,
            info=self._info,
        )

    @property
    def forgets(self) -> bool:
        """Whether the contents of the replay are lost when a run is resumed."""
        options = self._replay
        return options is not None and not options.at and not options.durable

    def close(self) -> None:
        """Stops the servers that it started and leaves the cluster."""
        if self._servers is not None:
            self._servers.close()
        if self._connection is not None:
            self._connection.close()


def _refuse_seeds(plan: Plan, settings: Settings) -> None:
    if settings.seeds > 1 and not (plan.fused and plan.replicas == 1):
        raise UserError(
            f"--seeds {settings.seeds} trains several seeds as one compiled batch, which needs "
            f"--strategy fused on one device; this plan is {plan.strategy}'s, with "
            f"{plan.replicas} learner replica{'s' * (plan.replicas > 1)}."
        )
