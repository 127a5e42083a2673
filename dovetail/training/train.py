"""`train` and `resume`: check the options, plan the phases, and run them into a run folder."""

import dataclasses
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.algorithm import Algorithm
from dovetail.algorithms import ALGORITHMS
from dovetail.envs.info import with_info
from dovetail.envs.resolve import resolve
from dovetail.envs.wrapping import rooted, with_wraps
from dovetail.errors import UserError, check_option
from dovetail.hosts.deployment import Deployment, rebuilt
from dovetail.loading import refuse_while_loading
from dovetail.locking import FolderLock
from dovetail.plan import serial
from dovetail.plan.explanation import Explanation
from dovetail.run.folder import Run
from dovetail.run.settings import Settings
from dovetail.strategies import STRATEGIES
from dovetail.strategies.interface import Strategy
from dovetail.training.callbacks import Callbacks, Given
from dovetail.training.changes import refuse_other_shapes, with_changes
from dovetail.training.config import (
    describe,
    name_of,
    options_of,
    rebuild_all,
    refuse_missing,
)
from dovetail.training.dataset import MEMORY, RecordedData, check_data
from dovetail.training.phases import acting_strategy, acts_at_all, check_steps, choose_strategy
from dovetail.training.planning import Planned, prepare_backend, resolve_algorithm
from dovetail.training.prepare import Preparation, RunStart
from dovetail.training.replay_servers import ServedReplay
from dovetail.training.reporting import check_sinks
from dovetail.training.session import conduct
from dovetail.training.signals import stopping
from dovetail.training.start import enable_compile_cache
from dovetail.training.trust import code_of, remember
from dovetail.training.warm_start import warm_start


def train(
    algorithm: Algorithm | str,
    env: Any = None,
    strategy: Strategy | str | None = None,
    *,
    total_steps: int = 200_000,
    seed: int = 0,
    data: str | Path | None = None,
    online_steps: int = 0,
    data_memory: int = MEMORY,
    cluster: Deployment | str | None = None,
    replay: ServedReplay | str | None = None,
    init_from: str | Path | Run | None = None,
    wrap: str | Sequence[Any] = (),
    settings: Settings = Settings(),
    callback: Given = None,
) -> Run:
    """Trains `algorithm` on `env` for `total_steps` environment steps; returns the run.

    `algorithm` is an object, as in `train(PPO(gamma=0.9), …)`, or a name, as in `train("ppo", …)`.
    `env` is an id ("CartPole-v1", "gymnax:Breakout-MinAtar"), a `JaxEnv`, or a class or factory of
    Gymnasium environments. `strategy` distributes the loop; the default is Fused for JAX
    environments and Local for others. With `cluster` the run uses Ray: "local" starts a cluster on
    this machine, "auto" joins the one running here, "host:port" another one. A `Deployment` has
    more options.

    `wrap` are wrappers around each environment, the first innermost: names ("frame-stack:4",
    "FlattenObservation", "file.py:MyWrapper"), wrapper classes, or functions env → env.

    `data` is the folder of a dataset to learn from. An offline algorithm takes `total_steps`
    gradient steps on it without acting; `env` then serves evaluation only and defaults to the
    environment that the dataset names. With `online_steps`, training continues in `env` for that
    many environment steps under `strategy`. An off-policy algorithm takes `data_share` of each
    batch from the dataset. A dataset of more than `data_memory` megabytes is streamed instead of
    held in memory.

    `replay` is the location of an off-policy algorithm's replay: "learner" (the default), "servers"
    for server processes of this run, or the address of running servers. A `ServedReplay` has more
    options.

    `init_from` is a run whose parameters this one begins with: a warm start, on the same task or on
    another one with the same observations and actions. Nothing else is taken from it.

    `callback` is a function, or several, called with a `TrainingEvent` at every report, evaluation
    and checkpoint and at the end. If it returns False, the run stops as if it were done. A string,
    "file.py:function" or "module:function", names a function that a resumed run calls again.

    Call it from the main thread: the first Ctrl-C or SIGTERM then saves a checkpoint and stops.
    """
    began = time.perf_counter()
    refuse_while_loading("dt.train")
    algorithm = resolve_algorithm(algorithm)
    env = env if env is None else with_wraps(env, wrap)
    check_steps(total_steps, online_steps, data is not None)
    check_option("seed", seed, 0 <= seed < 2**31, "0 or more, and less than 2147483648")
    check_sinks(settings)
    called = Callbacks(callback)
    check_data(algorithm, data is not None)
    enable_compile_cache()
    where = Deployment(cluster) if isinstance(cluster, str) else cluster
    kept = ServedReplay.of(replay)
    with stopping() as stop, ExitStack() as stack:
        recorded = None if data is None else _opened(data, data_memory, stack)
        given, silent = _given_env(env, recorded)
        chosen = choose_strategy(
            algorithm, strategy, given, recorded is not None, online_steps, kept is not None
        )
        # On a cluster this process only drives the run: one device is enough.
        prepare_backend(chosen, None if where is None else 1)
        acts = acts_at_all(algorithm, recorded is not None, online_steps)
        found = resolve(given, traced=chosen.traced_envs if acts or strategy else None)
        _refuse_unusable(settings, acts, silent, kept)
        config = describe(
            algorithm, given, found, chosen, steps=total_steps, seed=seed, settings=settings
        )
        config["cluster"] = None if where is None else dataclasses.asdict(where)
        config |= {"data": None, "online_steps": online_steps}
        config["replay"] = None if kept is None else dataclasses.asdict(kept)
        config["callback"] = called.names
        if recorded is not None:
            known = "data" if silent else config["env_given"]
            config |= {"data": recorded.identity, "env_given": known}
            config["env"] = found.spec.id if silent else rooted(found.spec.id)
        acted = with_info(found, settings.log_info)
        making = Preparation(algorithm, given, acted, where, settings, recorded, seed, kept)
        prepared = making.phases(chosen, total_steps, online_steps, stack)
        if recorded is not None:
            recorded.check()  # before the folder exists: a bad dataset must not leave one behind
        warm = None if init_from is None else warm_start(init_from, prepared[0].algorithm)
        config["init_from"] = None if warm is None else str(warm.run)
        remember(code_of(config))
        run = Run.create(settings.folder, _run_name(config), config)
        stack.enter_context(FolderLock(run.path, "run"))
        _write_plan(run, prepared[-1].planned)
        start = RunStart(run, found, prepared, config, settings, began, recorded, silent, False)
        return conduct(replace(start, warm=warm, callbacks=called), stop)


def resume(
    run: str | Path | Run,
    total_steps: int | None = None,
    env: Any = None,
    cluster: Deployment | str | None = None,
    online_steps: int | None = None,
    callback: Given = None,
    algorithm: type | str | None = None,
    data: str | Path | None = None,
    checkpoint: int | None = None,
    trust: bool = False,
    **options: Any,
) -> Run:
    """Continues a run from its last checkpoint, in the same folder; returns the run.

    `options` change the algorithm's options or the settings from here on: `resume(run,
    learning_rate=1e-4)`. The run's config lists every change, and refuses one that its state was
    not made for, such as the size of a network.

    Without `total_steps` it ends where the uninterrupted run would have. `total_steps` sets a new
    total; the learning rate is annealed over it from then on. `online_steps` does the same for the
    environment steps that follow offline training. `env` is required if the run was started with a
    Python object. `cluster` replaces the cluster of the earlier start, `callback` its callbacks.
    `env`, `algorithm` (a class, or "file.py:Name") and `data` also give the new place of a file or
    dataset that has moved. `checkpoint` is the number of an earlier checkpoint to go on from; the
    later ones are then replaced. `trust` allows the code that the run's config names, if the run
    was made elsewhere.
    """
    began = time.perf_counter()
    refuse_while_loading("dt.resume")
    opened = run if isinstance(run, Run) else Run.open(run)
    config = dict(opened.config)
    before, strategy, earlier = rebuild_all(config, algorithm, trust, env)
    made, settings, changed = with_changes(before, earlier, options)
    config |= {"options": options_of(made), "settings": dataclasses.asdict(settings)}
    if algorithm is not None:
        config["algorithm"] = name_of(made, ALGORITHMS)
    if isinstance(env, str):
        config |= {"env": rooted(env), "env_given": "id"}
    check_sinks(settings)
    called = Callbacks(config.get("callback") if callback is None else callback)
    config["callback"] = called.names
    where = Deployment(cluster) if isinstance(cluster, str) else cluster
    where = rebuilt(config.get("cluster")) if where is None else where
    config["cluster"] = None if where is None else dataclasses.asdict(where)
    prepare_backend(strategy, None if where is None else 1)
    if env is None and config.get("env_given") == "object":
        raise UserError(
            f"{opened.path} was trained on a Python object ({config['env']}): resume it from "
            f"Python with dovetail.resume(run, env=…)."
        )
    enable_compile_cache()
    online_before = config.get("online_steps", 0)
    config["steps"] = config["steps"] if total_steps is None else total_steps
    config["online_steps"] = online_before if online_steps is None else online_steps
    totals, known = (config["steps"], config["online_steps"]), config.get("data")
    check_steps(*totals, known is not None)
    with stopping() as stop, ExitStack() as stack:
        stack.enter_context(FolderLock(opened.path, "run"))
        opened.sweep()
        recorded = None if known is None else _reopened(known, data, stack)
        if recorded is not None:
            config["data"] = recorded.identity
        given, silent = _known_env(env, config, recorded)
        found = resolve(given, traced=strategy.traced_envs)
        acts = acts_at_all(made, recorded is not None, config["online_steps"])
        kept = ServedReplay.rebuilt(config.get("replay"))
        _refuse_unusable(settings, acts, silent, kept)
        # A first online phase: the strategy was chosen for offline training and may not act.
        if config["online_steps"] and not online_before:
            strategy = acting_strategy(strategy, given, found)
            config |= {
                "strategy": name_of(strategy, STRATEGIES),
                "strategy_options": options_of(strategy),
            }
        if "until" in changed:
            until = settings.until
            config["threshold"] = found.spec.threshold if until is None else until
        seed = config["seed"]
        acted = with_info(found, settings.log_info)
        making = Preparation(made, given, acted, where, settings, recorded, seed, kept)
        prepared = making.phases(strategy, *totals, stack)
        refuse_other_shapes(before, prepared[-1].algorithm, changed)
        start = RunStart(opened, found, prepared, config, settings, began, recorded, silent, True)
        given_now = {"algorithm": algorithm, "callback": callback}
        given_now["env"] = env if isinstance(env, str) else None
        remember(code_of({k: config.get(k) for k, x in given_now.items() if x is not None}))
        source = config.get("init_from")
        fresh = not any((opened.path / "checkpoints").glob("*/meta.json"))
        warm = warm_start(source, prepared[0].algorithm) if fresh and source else None
        start = replace(start, changed=changed, warm=warm, checkpoint=checkpoint, callbacks=called)
        return conduct(start, stop)


def _opened(data: str | Path, memory: int, stack: ExitStack) -> RecordedData:
    """Opens the dataset of a run; `stack` closes it."""
    opened = RecordedData(data, memory)
    stack.callback(opened.close)
    return opened


def _reopened(known: dict[str, Any], place: str | Path | None, stack: ExitStack) -> RecordedData:
    """Opens the dataset of a resumed run, at a new place if given; raises if it has changed."""
    if place is None and not Path(known["folder"]).is_dir():
        raise UserError(
            f"The run learns from the dataset {known['folder']}, and there is no such folder: give "
            "its new place with --data."
        )
    opened = _opened(place or known["folder"], known["memory"], stack)
    opened.refuse_other(known)
    return opened


def _given_env(env: Any, recorded: RecordedData | None) -> tuple[Any, str | None]:
    """Returns (environment to act or evaluate in, reason why there is none)."""
    if env is not None:
        return env, None
    if recorded is None:
        raise UserError("Name an environment, as in train(PPO(), 'CartPole-v1').")
    return recorded.environment()


def _known_env(
    env: Any, config: dict[str, Any], recorded: RecordedData | None
) -> tuple[Any, str | None]:
    """Returns (environment of a resumed run, reason why there is none)."""
    if env is not None:
        return env, None
    if config.get("env_given") == "data":
        assert recorded is not None
        return recorded.environment()
    refuse_missing(config["env"], "env")
    return config["env"], None


def _refuse_unusable(
    settings: Settings, acts: bool, silent: str | None, replay: ServedReplay | None
) -> None:
    """Raises if an option needs an environment that is missing, or acting in an offline run."""
    if silent is not None and (acts or settings.until is not None):
        raise UserError(f"There is no environment to act in ({silent}): name one with --env.")
    if settings.record is not None and not acts:
        raise UserError(
            "--record takes what is lived through, and nobody acts in this run: leave it out."
        )
    if replay is not None and not acts:
        raise UserError(
            "--replay says where a replay is kept, and nobody acts in this run: leave it out."
        )


def _run_name(config: dict[str, Any]) -> str:
    algorithm = Path(config["algorithm"]).name.rpartition(":")[2]
    env = config["env_id"].partition("?")[0].rpartition(":")[2]
    return f"{algorithm}-{env}-{config['seed']}".lower()


def _write_plan(run: Run, planned: Planned) -> None:
    explanation = Explanation(planned.graph, planned.plan)
    run.write_text("plan.txt", f"{explanation}\n")
    run.write_json("plan.json", serial.to_json(planned.plan))
    run.write_text("graph.svg", explanation.svg())
