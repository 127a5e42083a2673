"""From an algorithm, an environment and a policy to a finished run folder."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from dovetail.algorithm import Algorithm, Task
from dovetail.checkpoint import Checkpoints
from dovetail.clustering import Parcel, Recipe, cluster_runtime, connect, join
from dovetail.data.episode import Source
from dovetail.deployment import Deployment, rebuilt
from dovetail.envs.resolve import Env, resolve
from dovetail.errors import UserError, check_option
from dovetail.evaluation import Evaluator
from dovetail.explanation import Explanation
from dovetail.plan import serial
from dovetail.plan.ir import Plan
from dovetail.planning import Planned, plan_for, prepare_backend, resolve_policy
from dovetail.policies.interface import Policy
from dovetail.run import Run
from dovetail.runtime.local import Runtime
from dovetail.settings import Settings
from dovetail.telemetry.progress import make_progress
from dovetail.telemetry.remote import check_services
from dovetail.telemetry.status import Status
from dovetail.telemetry.timeline import Timeline
from dovetail.training.config import describe, rebuild_all
from dovetail.training.evaluating import BackgroundEvaluation
from dovetail.training.finish import finish
from dovetail.training.loop import Diverged, Loop, Reached, Snapshot
from dovetail.training.recording import RecordingRuntime, not_recorded, record_training, recorded
from dovetail.training.start import enable_compile_cache, first_state, resumed_keys, shapes
from dovetail.training.stopping import Stop, stopping
from dovetail.training.telling import make_exporter, make_recorder

if TYPE_CHECKING:
    from dovetail.telemetry.exporting import ExporterProcess


def train(
    algorithm: Algorithm,
    env: Any,
    policy: Policy | str | None = None,
    *,
    steps: int = 200_000,
    seed: int = 0,
    cluster: Deployment | str | None = None,
    settings: Settings = Settings(),
) -> Run:
    """Trains `algorithm` on `env` for `steps` environment steps; returns the run's folder.

    `env` is an id ("CartPole-v1", "gymnax:Breakout-MinAtar"), a `JaxEnv`, or a class or factory of
    Gymnasium environments. `policy` says how the loop is distributed: Fused for JAX environments
    and Local for others unless given. With `cluster` it runs on Ray: "local" starts one on this
    machine, "auto" joins the one that runs here, "host:port" another; a `Deployment` says more.
    """
    began = time.perf_counter()
    check_option("steps", steps, steps >= 1, "1 or more")
    check_option("seed", seed, 0 <= seed < 2**31, "0 or more, and less than 2147483648")
    check_services(settings.log)
    enable_compile_cache()
    chosen = resolve_policy(policy, env)
    where = Deployment(cluster) if isinstance(cluster, str) else cluster
    prepare_backend(chosen, None if where is None else 1)
    found = resolve(env, traced=chosen.traced_envs)
    with stopping() as stop, ExitStack() as stack:
        place = Place(algorithm, env, chosen, where, settings.record is not None)
        stack.callback(place.close)
        planned = place.plan(found, steps, settings)
        config = describe(algorithm, env, found, chosen, steps=steps, seed=seed, settings=settings)
        config["cluster"] = None if where is None else dataclasses.asdict(where)
        run = Run.create(settings.folder, _run_name(config), config)
        _write_plan(run, planned)
        start = _Start(run, algorithm, planned, config, settings, began, place)
        return start.go(stop, restore=False)


def resume(
    run: str | Path | Run,
    steps: int | None = None,
    env: Any = None,
    cluster: Deployment | str | None = None,
) -> Run:
    """Goes on with a run from its last checkpoint, in its own folder.

    Without `steps` it ends as the uninterrupted run would have. `steps` sets a new total, over
    which the learning rate is annealed from now on. `env` is needed again if the run was given a
    Python object, `cluster` only if it is to be another one.
    """
    began = time.perf_counter()
    opened = run if isinstance(run, Run) else Run.open(run)
    config = dict(opened.config)
    algorithm, policy, settings = rebuild_all(config)
    check_services(settings.log)
    where = Deployment(cluster) if isinstance(cluster, str) else cluster
    where = rebuilt(config.get("cluster")) if where is None else where
    config["cluster"] = None if where is None else dataclasses.asdict(where)
    prepare_backend(policy, None if where is None else 1)
    if env is None and config.get("env_given") == "object":
        raise UserError(
            f"{opened.path} was trained on a Python object ({config['env']}): resume it from "
            f"Python with dovetail.resume(run, env=…)."
        )
    enable_compile_cache()
    if steps is not None:
        check_option("steps", steps, steps >= 1, "1 or more")
        config["steps"] = steps
    given = env if env is not None else config["env"]
    found = resolve(given, traced=policy.traced_envs)
    with stopping() as stop, ExitStack() as stack:
        place = Place(algorithm, given, policy, where, settings.record is not None)
        stack.callback(place.close)
        planned = place.plan(found, config["steps"], settings)
        start = _Start(opened, algorithm, planned, config, settings, began, place)
        return start.go(stop, restore=True)


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
        self._given, self._env, self._policy = algorithm, env, policy
        self._algorithm = recorded(algorithm) if record else algorithm
        self._deployment = deployment
        self._connection: Any = None

    def plan(self, env: Env, steps: int, settings: Settings) -> Planned:
        """The plan of the run; a cluster is joined for it."""
        resources = None
        if self._deployment is not None:
            parcel = Parcel.of(self._recipe(steps), self._deployment)
            self._connection, resources = join(self._deployment, parcel)
        try:
            planned = plan_for(self._algorithm, env, self._policy, steps, resources)
        except UserError as error:
            if self._algorithm is self._given:
                raise
            plan_for(self._given, env, self._policy, steps, resources)  # has its own word to say
            raise not_recorded(self._policy) from error
        _refuse_seeds(planned.plan, settings)
        return planned

    def runtime(
        self, planned: Planned, steps: int, settings: Settings, tell: Callable[[str], None]
    ) -> Any:
        """What runs the plan."""
        if self._deployment is None:
            return Runtime(
                planned.graph, planned.plan, planned.env, settings.seeds, settings.patience, tell
            )
        if self._connection is None:
            tell("Starting a Ray cluster on this machine.")
            self._connection = connect(self._deployment, planned.plan)
        return cluster_runtime(
            self._recipe(steps), planned, self._deployment, self._connection, settings, tell
        )

    def _recipe(self, steps: int) -> Recipe:
        return Recipe(self._algorithm, self._env, self._policy, steps, enable_compile_cache)

    def close(self) -> None:
        """Leaves the cluster."""
        if self._connection is not None:
            self._connection.close()


def _tell(show: Callable[[str], None], keep: Callable[[str], None], text: str) -> None:
    show(text)
    keep(text)


def _ending(error: BaseException | None, stop: Stop) -> str:
    """How a run ended, in words."""
    if error is not None:
        return str(error) or type(error).__name__
    return "done" if stop.signal is None else f"stopped by {stop.signal.name}"


def _refuse_seeds(plan: Plan, settings: Settings) -> None:
    if settings.seeds > 1 and not (plan.fused and plan.replicas == 1):
        raise UserError(
            f"--seeds {settings.seeds} trains several seeds as one compiled batch, which needs "
            f"--policy fused on one device; this plan is {plan.policy}'s, with "
            f"{plan.replicas} learner replicas."
        )


def _positions(acting: Callable[[Any], Any], state: Any) -> list[int]:
    """The leaves of the learner's state that acting takes, by their positions."""
    tree = jax.tree.structure(state)
    numbered = acting(tree.unflatten(range(tree.num_leaves)))
    found = [leaf for leaf in jax.tree.leaves(numbered) if isinstance(leaf, int)]
    return found or list(range(tree.num_leaves))


def _run_name(config: dict[str, Any]) -> str:
    algorithm = Path(config["algorithm"]).name.rpartition(":")[2]
    return f"{algorithm}-{config['env_id'].rpartition(':')[2]}-{config['seed']}".lower()


def _write_plan(run: Run, planned: Planned) -> None:
    explanation = Explanation(planned.graph, planned.plan)
    run.write_text("plan.txt", f"{explanation}\n")
    run.write_json("plan.json", serial.to_json(planned.plan))
    run.write_text("graph.svg", explanation.svg())


@dataclasses.dataclass
class _Start:
    """One start of a run, new or resumed: everything that must be closed again at its end."""

    run: Run
    algorithm: Algorithm
    planned: Planned
    config: dict[str, Any]
    settings: Settings
    began: float
    place: Place
    _running: Loop | None = None
    _exporting: "ExporterProcess | None" = None

    def go(self, stop: Stop, restore: bool) -> Run:
        """Runs the loop and finishes the folder; whatever happens, nothing is left open."""
        env, plan = self.planned.env, self.planned.plan
        steps = self.config["steps"]
        task = Task(env.spec, plan.update_envs, steps, plan.num_envs, plan.shards)
        with ExitStack() as stack:
            progress = make_progress(self.settings.display, self.config["steps"])
            stack.callback(progress.close)
            status = Status(self.run, self._workers, self._progress)
            stack.push(lambda kind, error, _: status.close(_ending(error, stop), error))
            progress.message(f"{self._title()} → {self.run.path}")
            exporter = self._exporting = make_exporter(
                self.config, self.settings, plan, restore, progress.message
            )
            if exporter is not None:
                stack.callback(exporter.close)
            checkpoints = Checkpoints(self.run.path / "checkpoints", self.settings.keep)
            stack.callback(checkpoints.close)
            bound = self.algorithm.bind(task)
            try:
                tell = partial(_tell, progress.message, status.message)
                loop = self._loop(bound, checkpoints, restore, stack, tell)
                self._running = loop
            except Exception as error:
                if stop:  # environments in processes of their own may be stopped before us
                    raise stop.stopped("before training began.") from error
                if restore and isinstance(error, UserError):
                    status.withdraw()
                raise
            recorder = make_recorder(self.run, self.config, self.settings, loop.reached, tell)
            stack.callback(recorder.close)
            evaluator = Evaluator(
                bound, env, episodes=self.settings.episodes, seed=self.config["seed"]
            )
            evaluations = BackgroundEvaluation(evaluator)
            stack.callback(evaluations.close)
            meta = {"algorithm": self.config["algorithm"], "options": self.config["options"]}
            try:
                loop.run(
                    self.config["steps"], stop, recorder, progress, checkpoints, evaluations, meta
                )
            except Exception as error:
                if not stop:  # as above
                    self._keep(loop, checkpoints, error)
                    raise
            if exporter is not None:
                exporter.ended()
            loop.save(checkpoints)
            loop.timeline.write(self.run, last=True)
            recorder.close()
            finish(self.run, self.config, loop, bound, env, evaluations, stop, progress)
            checkpoints.close()
        if stop:
            raise stop.stopped(
                f"after {loop.reached.env_steps:,} steps; everything is saved. Go on with: "
                f"dovetail train --resume {self.run.path}"
            )
        return self.run

    def _watchers(self) -> list[Callable[[dict[str, float], Timeline], None]]:
        """Who is shown every report."""
        written = [lambda _, timeline: timeline.write(self.run)]
        return written if self._exporting is None else [*written, self._exporting.publish]

    def _workers(self) -> list[dict[str, Any]]:
        return [] if self._running is None else self._running.runtime.status()

    def _progress(self) -> dict[str, Any]:
        loop = self._running
        if loop is None:
            return {"env_steps": 0, "last_report": 0.0}
        return {"env_steps": loop.reached.env_steps, "last_report": loop.last_report}

    def _keep(self, loop: Loop, checkpoints: Checkpoints, error: Exception) -> None:
        """Saves the last good state when an error ends the run; a user's error then says so."""
        with contextlib.suppress(UserError):  # the first error is the one to tell
            loop.save(checkpoints)
            checkpoints.wait()
        if isinstance(error, Diverged) and self._exporting is not None:
            self._exporting.diverged()
        if isinstance(error, UserError):
            saved, run = checkpoints.latest(), self.run.path
            kept = "Nothing was saved."
            if saved is not None:
                kept = f"Update {saved} is saved: go on with dovetail train --resume {run}"
            if saved is not None and isinstance(error, Diverged):
                kept = f"Update {saved} is saved in {run}"
            told = str(error)
            stop = "" if told.endswith((".", "!", "?")) else "."
            raise UserError(f"{told}{stop} {kept}") from error

    def _title(self) -> str:
        plan = self.planned.plan
        what = f"{plan.algorithm} on {plan.env}, {plan.policy}, {plan.num_envs} environments"
        return what if self.settings.seeds == 1 else f"{what}, {self.settings.seeds} seeds"

    def _loop(
        self,
        algorithm: Algorithm,
        checkpoints: Checkpoints,
        restore: bool,
        stack: ExitStack,
        tell: Callable[[str], None],
    ) -> Loop:
        plan, settings, env = self.planned.plan, self.settings, self.planned.env
        runtime = self.place.runtime(self.planned, self.config["steps"], settings, tell)
        stack.callback(runtime.close)
        if settings.record is not None:
            folder = self._dataset(checkpoints, restore)
            recorder = record_training(folder, algorithm, env, self._source())
            stack.enter_context(recorder)
            wrapped: Any = RecordingRuntime(runtime, algorithm, recorder)
            runtime = wrapped
        runtime.prepare(*shapes(algorithm, env.jax, plan.num_envs, settings.seeds))
        state, actor = first_state(
            algorithm, env.jax, plan.num_envs, self.config["seed"], settings.seeds
        )
        keys = None
        reached = Reached()
        if restore:
            expect = {"algorithm": self.config["algorithm"], "options": self.config["options"]}
            tree, meta = checkpoints.restore({"state": state, "actor": actor}, expect=expect)
            state, actor = tree["state"], tree["actor"]
            reached = Reached(
                meta["updates"], meta["env_steps"], meta["seconds"], meta["time_to_threshold"]
            )
            self._refuse_finished(reached)
            self.run.write_json("config.json", self.config)  # perhaps with another total
            keys = resumed_keys(actor, reached.updates) if env.jax is None else None
        actor = runtime.load(
            state,
            actor,
            episode_keys=keys,
            turn=reached.updates,
            watched=_positions(algorithm.acting, state),
        )
        return Loop(
            runtime,
            Snapshot(lambda: state, lambda: actor, reached.updates, reached.env_steps),
            reached,
            settings,
            threshold=self.config["threshold"],
            acting=algorithm.acting,
            began=self.began,
            watchers=self._watchers(),
            at_once=None if settings.record is None else 1,
        )

    def _dataset(self, checkpoints: Checkpoints, restore: bool) -> str:
        """The folder of the recording; a resumed run goes on in another one."""
        assert self.settings.record is not None
        updates = checkpoints.latest() if restore else None
        return self.settings.record + (f"-from-{updates}" if updates is not None else "")

    def _source(self) -> Source:
        """Where recorded episodes come from."""
        config = self.config
        return Source(
            environment=self.planned.env.spec.id,
            kind="training",
            run=str(self.run.path),
            algorithm=config["algorithm"],
            seed=config["seed"],
            dovetail=config["versions"]["dovetail"],
        )

    def _refuse_finished(self, reached: Reached) -> None:
        steps = self.config["steps"]
        if reached.env_steps >= steps and self.run.summary.get("final_return") is not None:
            raise UserError(
                f"{self.run.path} has taken {reached.env_steps:,} steps already, and its total is "
                f"{steps:,}: give a larger one with --steps."
            )
