"""From an algorithm, an environment and a strategy to a finished run folder."""

import dataclasses
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dovetail.algorithm import Algorithm
from dovetail.envs.resolve import resolve
from dovetail.errors import UserError, check_option
from dovetail.hosts.deployment import Deployment, rebuilt
from dovetail.inspection.explain import Explanation
from dovetail.plan import serial
from dovetail.run.folder import Run
from dovetail.run.settings import Settings
from dovetail.strategies import STRATEGIES
from dovetail.strategies.interface import Strategy
from dovetail.telemetry.remote import check_services
from dovetail.training.config import describe, name_of, options_of, rebuild_all
from dovetail.training.dataset import MEMORY, RecordedData, check_data
from dovetail.training.phases import acting_strategy, acts_at_all, check_steps, choose_strategy
from dovetail.training.planning import Planned, prepare_backend
from dovetail.training.prepare import Preparation, RunStart
from dovetail.training.replay_servers import ServedReplay
from dovetail.training.session import conduct
from dovetail.training.signals import stopping
from dovetail.training.start import enable_compile_cache


def train(
    algorithm: Algorithm,
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
    settings: Settings = Settings(),
) -> Run:
    """Trains `algorithm` on `env` for `total_steps` environment steps; returns the run's folder.

    `env` is an id ("CartPole-v1", "gymnax:Breakout-MinAtar"), a `JaxEnv`, or a class or factory of
    Gymnasium environments. `strategy` says how the loop is distributed: Fused for JAX environments
    and Local for others unless given. With `cluster` it runs on Ray: "local" starts one on this
    machine, "auto" joins the one that runs here, "host:port" another; a `Deployment` says more.

    `data` is the folder of a dataset to learn from. An algorithm that is made for recorded data
    takes `total_steps` gradient steps on it and never acts: `env`, by default the one that the
    dataset names, is for evaluation alone. With `online_steps` it then goes on in `env` for as many
    environment steps, and `strategy` is for these. Any other takes `data_share` of each batch from
    it. More than `data_memory` megabytes of it are not kept in memory, but read as they are needed.

    `replay` says where an off-policy algorithm's replay is kept: "learner" unless given, "servers"
    for server processes of this run, or the address of some that run already; a `ServedReplay`
    says more.
    """
    began = time.perf_counter()
    check_steps(total_steps, online_steps, data is not None)
    check_option("seed", seed, 0 <= seed < 2**31, "0 or more, and less than 2147483648")
    check_services(settings.log)
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
        if recorded is not None:
            known = "data" if silent else config["env_given"]
            config |= {"data": recorded.identity, "env": found.spec.id, "env_given": known}
        making = Preparation(algorithm, given, found, where, settings, recorded, seed, kept)
        prepared = making.phases(chosen, total_steps, online_steps, stack)
        if recorded is not None:
            recorded.check()  # while there is no folder that it could leave behind
        run = Run.create(settings.folder, _run_name(config), config)
        _write_plan(run, prepared[-1].planned)
        start = RunStart(run, found, prepared, config, settings, began, recorded, silent, False)
        return conduct(start, stop)


def resume(
    run: str | Path | Run,
    total_steps: int | None = None,
    env: Any = None,
    cluster: Deployment | str | None = None,
    online_steps: int | None = None,
) -> Run:
    """Goes on with a run from its last checkpoint, in its own folder.

    Without `total_steps` it ends as the uninterrupted run would have. `total_steps` sets a new
    total, over which the learning rate is annealed from now on; `online_steps` does so for the
    steps that a run acts after it has learned from recorded data. `env` is needed again if the run
    was given a Python object, `cluster` only if it is to be another one.
    """
    began = time.perf_counter()
    opened = run if isinstance(run, Run) else Run.open(run)
    config = dict(opened.config)
    algorithm, strategy, settings = rebuild_all(config)
    check_services(settings.log)
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
    before = config.get("online_steps", 0)
    config["steps"] = config["steps"] if total_steps is None else total_steps
    config["online_steps"] = before if online_steps is None else online_steps
    totals, known = (config["steps"], config["online_steps"]), config.get("data")
    check_steps(*totals, known is not None)
    with stopping() as stop, ExitStack() as stack:
        recorded = None if known is None else _reopened(known, stack)
        given, silent = _known_env(env, config, recorded)
        found = resolve(given, traced=strategy.traced_envs)
        acts = acts_at_all(algorithm, recorded is not None, config["online_steps"])
        kept = ServedReplay.rebuilt(config.get("replay"))
        _refuse_unusable(settings, acts, silent, kept)
        if config["online_steps"] and not before:
            strategy = acting_strategy(strategy, given, found)
            config |= {
                "strategy": name_of(strategy, STRATEGIES),
                "strategy_options": options_of(strategy),
            }
        seed = config["seed"]
        making = Preparation(algorithm, given, found, where, settings, recorded, seed, kept)
        prepared = making.phases(strategy, *totals, stack)
        start = RunStart(opened, found, prepared, config, settings, began, recorded, silent, True)
        return conduct(start, stop)


def _opened(data: str | Path, memory: int, stack: ExitStack) -> RecordedData:
    """The dataset of a run."""
    opened = RecordedData(data, memory)
    stack.callback(opened.close)
    return opened


def _reopened(known: dict[str, Any], stack: ExitStack) -> RecordedData:
    """The dataset that a resumed run began with."""
    opened = _opened(known["folder"], known["memory"], stack)
    opened.refuse_other(known)
    return opened


def _given_env(env: Any, recorded: RecordedData | None) -> tuple[Any, str | None]:
    """(what to act or to evaluate in, why that cannot be)."""
    if env is not None:
        return env, None
    if recorded is None:
        raise UserError("Name an environment, as in train(PPO(), 'CartPole-v1').")
    return recorded.environment()


def _known_env(
    env: Any, config: dict[str, Any], recorded: RecordedData | None
) -> tuple[Any, str | None]:
    """(what a resumed run acts or is evaluated in, why that cannot be)."""
    if env is not None:
        return env, None
    if config.get("env_given") == "data":
        assert recorded is not None
        return recorded.environment()
    return config["env"], None


def _refuse_unusable(
    settings: Settings, acts: bool, silent: str | None, replay: ServedReplay | None
) -> None:
    """Refuses what needs an environment where there is none, and to record where nobody acts."""
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
    return f"{algorithm}-{config['env_id'].rpartition(':')[2]}-{config['seed']}".lower()


def _write_plan(run: Run, planned: Planned) -> None:
    explanation = Explanation(planned.graph, planned.plan)
    run.write_text("plan.txt", f"{explanation}\n")
    run.write_json("plan.json", serial.to_json(planned.plan))
    run.write_text("graph.svg", explanation.svg())
