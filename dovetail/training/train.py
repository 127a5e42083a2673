"""From an algorithm, an environment and a policy to a finished run folder."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from dovetail.algorithm import Algorithm
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
from dovetail.planning import Planned, plan_for, prepare_backend
from dovetail.policies import POLICIES
from dovetail.policies.interface import Policy
from dovetail.replay.data import DataSpec, with_data, without_data
from dovetail.run import Run
from dovetail.runtime.local import Runtime
from dovetail.settings import Settings
from dovetail.telemetry.progress import make_progress
from dovetail.telemetry.remote import check_services
from dovetail.telemetry.status import Status
from dovetail.telemetry.timeline import Timeline
from dovetail.training.config import describe, name_of, options_of, rebuild_all
from dovetail.training.evaluating import BackgroundEvaluation
from dovetail.training.finish import finish
from dovetail.training.loop import Diverged, Loop, Reached, Snapshot
from dovetail.training.phases import (
    Phase,
    Prepared,
    acting_policy,
    acts_at_all,
    check_steps,
    choose_policy,
    phases,
    task_of,
)
from dovetail.training.recorded import MEMORY, RecordedData, check_data
from dovetail.training.recording import RecordingRuntime, not_recorded, record_training, recorded
from dovetail.training.start import enable_compile_cache, first_state, resumed_keys, shapes
from dovetail.training.stopping import Stop, stopping
from dovetail.training.telling import make_exporter, make_recorder

if TYPE_CHECKING:
    from dovetail.telemetry.exporting import ExporterProcess


def train(
    algorithm: Algorithm,
    env: Any = None,
    policy: Policy | str | None = None,
    *,
    steps: int = 200_000,
    seed: int = 0,
    data: str | Path | None = None,
    online_steps: int = 0,
    data_memory: int = MEMORY,
    cluster: Deployment | str | None = None,
    settings: Settings = Settings(),
) -> Run:
    """Trains `algorithm` on `env` for `steps` environment steps; returns the run's folder.

    `env` is an id ("CartPole-v1", "gymnax:Breakout-MinAtar"), a `JaxEnv`, or a class or factory of
    Gymnasium environments. `policy` says how the loop is distributed: Fused for JAX environments
    and Local for others unless given. With `cluster` it runs on Ray: "local" starts one on this
    machine, "auto" joins the one that runs here, "host:port" another; a `Deployment` says more.

    `data` is the folder of a dataset to learn from. An algorithm that is made for recorded data
    takes `steps` gradient steps on it and never acts: `env`, by default the one that the dataset
    names, is for evaluation alone. With `online_steps` it then goes on in `env` for as many
    environment steps, and `policy` is for these. Any other takes `data_share` of each batch from
    it. More than `data_memory` megabytes of it are not kept in memory, but read as they are needed.
    """
    began = time.perf_counter()
    check_steps(steps, online_steps, data is not None)
    check_option("seed", seed, 0 <= seed < 2**31, "0 or more, and less than 2147483648")
    check_services(settings.log)
    check_data(algorithm, data is not None)
    enable_compile_cache()
    where = Deployment(cluster) if isinstance(cluster, str) else cluster
    with stopping() as stop, ExitStack() as stack:
        recorded = _opened(data, data_memory, where, stack)
        given, silent = _given_env(env, recorded)
        chosen = choose_policy(algorithm, policy, given, recorded is not None, online_steps)
        prepare_backend(chosen, None if where is None else 1)
        acts = acts_at_all(algorithm, recorded is not None, online_steps)
        found = resolve(given, traced=chosen.traced_envs if acts or policy else None)
        _refuse_unusable(found, settings, acts, silent)
        config = describe(
            algorithm, given, found, chosen, steps=steps, seed=seed, settings=settings
        )
        config["cluster"] = None if where is None else dataclasses.asdict(where)
        config |= {"data": None, "online_steps": online_steps}
        if recorded is not None:
            known = "data" if silent else config["env_given"]
            config |= {"data": recorded.identity, "env": found.spec.id, "env_given": known}
        making = _Making(algorithm, given, found, where, settings, recorded, seed)
        prepared = making.phases(chosen, steps, online_steps, stack, check=True)
        run = Run.create(settings.folder, _run_name(config), config)
        _write_plan(run, prepared[-1].planned)
        start = _Start(run, found, prepared, config, settings, began, recorded, silent)
        return start.go(stop, restore=False)


def resume(
    run: str | Path | Run,
    steps: int | None = None,
    env: Any = None,
    cluster: Deployment | str | None = None,
    online_steps: int | None = None,
) -> Run:
    """Goes on with a run from its last checkpoint, in its own folder.

    Without `steps` it ends as the uninterrupted run would have. `steps` sets a new total, over
    which the learning rate is annealed from now on; `online_steps` does so for the steps that a run
    acts after it has learned from recorded data. `env` is needed again if the run was given a
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
        config["steps"] = steps
    before = config.get("online_steps", 0)
    config["online_steps"] = before if online_steps is None else online_steps
    known = config.get("data")
    check_steps(config["steps"], config["online_steps"], known is not None)
    with stopping() as stop, ExitStack() as stack:
        recorded = None
        if known is not None:
            recorded = _opened(known["folder"], known["memory"], where, stack)
            assert recorded is not None
            recorded.refuse_other(known)
        given, silent = env if env is not None else config["env"], None
        if env is None and config.get("env_given") == "data":
            assert recorded is not None
            given, silent = recorded.environment()
        found = resolve(given, traced=policy.traced_envs)
        acts = acts_at_all(algorithm, recorded is not None, config["online_steps"])
        _refuse_unusable(found, settings, acts, silent)
        if config["online_steps"] and not before:
            policy = acting_policy(policy, given, found)
            config |= {"policy": name_of(policy, POLICIES), "policy_options": options_of(policy)}
        making = _Making(algorithm, given, found, where, settings, recorded, config["seed"])
        totals = config["steps"], config["online_steps"]
        prepared = making.phases(policy, *totals, stack, check=False)
        start = _Start(opened, found, prepared, config, settings, began, recorded, silent)
        return start.go(stop, restore=True)


def _opened(
    data: str | Path | None, memory: int, where: Deployment | None, stack: ExitStack
) -> RecordedData | None:
    """The dataset of a run, if there is one."""
    if data is None:
        return None
    if where is not None:
        raise UserError(
            "Recorded data are learned from on this machine, not on a cluster: leave --cluster or "
            "--data out."
        )
    opened = RecordedData(data, memory)
    stack.callback(opened.close)
    return opened


def _given_env(env: Any, recorded: RecordedData | None) -> tuple[Any, str | None]:
    """(what to act or to evaluate in, why that cannot be)."""
    if env is not None:
        return env, None
    if recorded is None:
        raise UserError("Name an environment, as in train(PPO(), 'CartPole-v1').")
    return recorded.environment()


def _refuse_unusable(env: Env, settings: Settings, acts: bool, silent: str | None) -> None:
    """Refuses what needs an environment where there is none, and to record where nobody acts."""
    if silent is not None and (acts or settings.until is not None):
        raise UserError(f"There is no environment to act in ({silent}): name one with --env.")
    if settings.record is not None and not acts:
        raise UserError(
            "--record takes what is lived through, and nobody acts in this run: leave it out."
        )


@dataclasses.dataclass(frozen=True)
class _Making:
    """What the phases of a run are made of."""

    algorithm: Algorithm
    given: Any
    env: Env
    where: Deployment | None
    settings: Settings
    recorded: RecordedData | None
    seed: int

    def phases(
        self, policy: Policy, steps: int, online_steps: int, stack: ExitStack, check: bool
    ) -> list[Prepared]:
        """The phases of a run, each with its plan."""
        data = None
        if self.recorded is not None:
            data = self.recorded.prepare(self.algorithm, self.env.spec, self.seed, check)
        found: list[Prepared] = []
        for one in phases(self.algorithm, policy, steps, online_steps, data is not None):
            end = found[0].last_step + online_steps if found else one.end
            phase = dataclasses.replace(one, end=end)
            record = self.settings.record is not None and phase.online
            place = Place(self.algorithm, self.given, phase.policy, self.where, record)
            stack.callback(place.close)
            total = phase.end if phase.online else steps
            planned = place.plan(self.env, total, self.settings, data, phase.online)
            bound = self.algorithm.bind(task_of(planned, total, data, phase.online))
            found.append(Prepared(phase, place, planned, bound))
        return found


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
        try:
            planned = plan_for(self._algorithm, env, self._policy, steps, resources, data, online)
        except UserError as error:
            if self._algorithm is self._given:
                raise
            # has its own word to say
            plan_for(self._given, env, self._policy, steps, resources, data, online)
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


class Started(NamedTuple):
    """What a phase starts from."""

    state: Any
    actor: Any
    """None if nobody acted."""
    reached: Reached


@dataclasses.dataclass
class _Start:
    """One start of a run, new or resumed: everything that must be closed again at its end."""

    run: Run
    env: Env
    phases: list[Prepared]
    config: dict[str, Any]
    settings: Settings
    began: float
    recorded: RecordedData | None = None
    silent: str | None = None
    """Why nothing is evaluated, if so."""
    _running: Loop | None = None
    _exporting: "ExporterProcess | None" = None

    @property
    def planned(self) -> Planned:
        """The plan of the last phase."""
        return self.phases[-1].planned

    def go(self, stop: Stop, restore: bool) -> Run:
        """Runs the loop and finishes the folder; whatever happens, nothing is left open."""
        env, plan = self.env, self.planned.plan
        with ExitStack() as stack:
            progress = make_progress(self.settings.display, self.phases[-1].phase.end)
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
            tell = partial(_tell, progress.message, status.message)
            loops = stack.enter_context(ExitStack())
            try:
                at, started = self._restored(checkpoints) if restore else (0, None)
                loop = self._loop(self.phases[at], checkpoints, started, loops, tell)
                self._running = loop
            except Exception as error:
                if stop:  # environments in processes of their own may be stopped before us
                    raise stop.stopped("before training began.") from error
                if restore and isinstance(error, UserError):
                    status.withdraw()
                raise
            recorder = make_recorder(self.run, self.config, self.settings, loop.reached, tell)
            stack.callback(recorder.close)
            bound = self.phases[-1].algorithm
            evaluations = BackgroundEvaluation(self._evaluator(bound, env))
            stack.callback(evaluations.close)
            while True:
                phase = self.phases[at].phase
                meta = self._meta(phase)
                self._introduce(phase, loop, tell)
                try:
                    loop.run(phase.end, stop, recorder, progress, checkpoints, evaluations, meta)
                except Exception as error:
                    if not stop:  # as above
                        self._keep(loop, checkpoints, error)
                        raise
                at += 1
                over = at == len(self.phases) or bool(stop) or loop.ends(evaluations, stop)
                loop.save(checkpoints)
                if over:
                    break
                before = Started(loop.good.state(), None, loop.reached)
                loops.close()
                loop = self._loop(self.phases[at], checkpoints, before, loops, tell, loop)
                self._running = loop
            if exporter is not None:
                exporter.ended()
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
        acting = f", {plan.num_envs} environments" if self.planned.graph.unrolls else ""
        what = f"{plan.algorithm} on {plan.env}, {plan.policy}{acting}"
        return what if self.settings.seeds == 1 else f"{what}, {self.settings.seeds} seeds"

    def _evaluator(self, algorithm: Algorithm, env: Env) -> Evaluator | None:
        """What evaluates; nothing where there is no environment."""
        if self.silent is not None:
            return None
        episodes, seed = self.settings.episodes, self.config["seed"]
        return Evaluator(algorithm, env, episodes=episodes, seed=seed)

    def _meta(self, phase: Phase) -> dict[str, Any]:
        """What checkpoints say of the run; whether a phase acts only where it might not."""
        meta = {"algorithm": self.config["algorithm"], "options": self.config["options"]}
        return meta if self.recorded is None else meta | {"online": phase.online}

    def _introduce(self, phase: Phase, loop: Loop, tell: Callable[[str], None]) -> None:
        """Says what the steps of a phase are, where that is not plain."""
        if self.recorded is None:
            return
        left, reader = max(phase.end - loop.reached.env_steps, 0), self.recorded.reader
        data = f"{reader.num_steps:,} recorded steps of {reader.folder}"
        if phase.online:
            tell(f"{left:,} environment steps, with batches from the replay and {data}.")
            return
        read = ", read as they are needed" if self.recorded.streamed else ""
        tell(f"{left:,} gradient steps on {data}{read}; nobody acts.")
        if self.silent is not None:
            tell(f"Nothing is evaluated: {self.silent}.")

    def _restored(self, checkpoints: Checkpoints) -> tuple[int, "Started"]:
        """(the phase to go on with, what it starts from)."""
        expect = {"algorithm": self.config["algorithm"], "options": self.config["options"]}
        at = 0
        if self.recorded is not None:
            acted = checkpoints.meta()["online"]
            at = next((i for i, one in enumerate(self.phases) if one.phase.online == acted), 0)
        prepared = self.phases[at]
        plan, env = prepared.planned.plan, prepared.planned.env
        like = shapes(prepared.algorithm, env.jax, plan.num_envs, self.settings.seeds)
        actor = like[1] if prepared.phase.online else ()
        tree, meta = checkpoints.restore(
            {"state": without_data(like[0]), "actor": actor}, expect=expect
        )
        reached = Reached(
            meta["updates"], meta["env_steps"], meta["seconds"], meta["time_to_threshold"]
        )
        self._refuse_finished(reached)
        self.run.write_json("config.json", self.config)  # perhaps with another total
        if not prepared.phase.online:
            over = reached.env_steps >= prepared.phase.end
            return min(at + over, len(self.phases) - 1), Started(tree["state"], None, reached)
        return at, Started(tree["state"], tree["actor"], reached)

    def _loop(
        self,
        prepared: Prepared,
        checkpoints: Checkpoints,
        started: "Started | None",
        stack: ExitStack,
        tell: Callable[[str], None],
        before: Loop | None = None,
    ) -> Loop:
        """The loop of a phase; it starts from what was restored, or what the phase before left."""
        algorithm, planned, phase = prepared.algorithm, prepared.planned, prepared.phase
        plan, settings, env = planned.plan, self.settings, planned.env
        runtime = prepared.place.runtime(planned, self.config["steps"], settings, tell)
        stack.callback(runtime.close)
        reached = Reached() if started is None else started.reached
        if settings.record is not None and phase.online:
            folder = self._dataset(checkpoints, started is not None and before is None)
            recorder = record_training(folder, algorithm, env, self._source())
            stack.enter_context(recorder)
            wrapped: Any = RecordingRuntime(runtime, algorithm, recorder)
            runtime = wrapped
        runtime.prepare(*shapes(algorithm, env.jax, plan.num_envs, settings.seeds))
        feed = data = None
        if self.recorded is not None:
            feed = self.recorded.feed(algorithm)
            stack.callback(feed.close)
            data = feed.take(reached.updates)
        state, actor = first_state(
            algorithm, env.jax, plan.num_envs, self.config["seed"], settings.seeds, data
        )
        keys = None
        if started is not None and started.actor is not None:
            state, actor = with_data(started.state, data), started.actor
            keys = resumed_keys(actor, reached.updates) if env.jax is None else None
        elif started is not None and phase.online:
            state = algorithm.go_online(started.state, state)
        elif started is not None:
            state = with_data(started.state, data)
        actor = runtime.load(
            state,
            actor,
            episode_keys=keys,
            turn=reached.updates,
            watched=_positions(algorithm.acting, state),
        )
        loop = Loop(
            runtime,
            Snapshot(lambda replay=True: state, lambda: actor, reached.updates, reached.env_steps),
            reached,
            settings,
            threshold=self.config["threshold"],
            acting=algorithm.acting,
            began=self.began,
            watchers=self._watchers(),
            at_once=1 if settings.record is not None and phase.online else None,
            feed=feed,
        )
        if before is not None:
            loop.go_on_after(before)
        return loop

    def _dataset(self, checkpoints: Checkpoints, resumed: bool) -> str:
        """The folder of the recording; a resumed run goes on in another one."""
        assert self.settings.record is not None
        updates = checkpoints.latest() if resumed else None
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
        steps = self.phases[-1].phase.end
        ended = self.run.summary.get("final_return") is not None or self.silent is not None
        if reached.env_steps >= steps and ended:
            option = "--online-steps" if self.config.get("online_steps") else "--steps"
            raise UserError(
                f"{self.run.path} has taken {reached.env_steps:,} steps already, and its total is "
                f"{steps:,}: give a larger one with {option}."
            )
