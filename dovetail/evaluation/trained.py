"""Evaluates or shows the policy of an existing run."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dovetail.algorithm import Algorithm, Params, Task
from dovetail.boundaries import REPLAY
from dovetail.data.episode import Source
from dovetail.data.recorder import Recorder
from dovetail.data.recorder import record as record_dataset
from dovetail.envs.interface import EnvSpec
from dovetail.envs.resolve import Env, resolve
from dovetail.errors import UserError
from dovetail.evaluation.evaluate import Evaluation, evaluate
from dovetail.evaluation.export import load_policy
from dovetail.evaluation.play import knows_probabilities
from dovetail.graph.trace import abstract_actor
from dovetail.keys import seed_key
from dovetail.replay.replay import all_shards
from dovetail.run.checkpoint import Checkpoints, version_of
from dovetail.run.folder import Run
from dovetail.strategies.interface import Strategy
from dovetail.telemetry.video import record_video, show_window
from dovetail.training.config import rebuild_all
from dovetail.training.finish import seed_params
from dovetail.training.replay_servers import ServedReplay
from dovetail.training.start import enable_compile_cache

WATCH_SEED = 1_000_003
"""The default seed for watching; differs from those of training and evaluation."""


class Trained(NamedTuple):
    """The policy of a run's last checkpoint."""

    algorithm: Algorithm
    env: Env
    params: list[Params]
    """One set for each seed."""
    updates: int
    """Number of learner updates: the version of the weights."""


def load_trained(run: Run, env: Any = None, instead: EnvSpec | None = None) -> Trained:
    """Loads the algorithm, environment and parameters of a run's last checkpoint.

    `instead` describes the observations and actions if the run had no environment; it suffices for
    callers that never step one.
    """
    config = run.config
    algorithm, strategy, settings = rebuild_all(config)
    if env is None and instead is not None and lacks_environment(run):
        env = Env(instead, None, None)
    found = _environment(run, strategy, env)
    checkpoints = Checkpoints(run.path / "checkpoints", settings.keep)
    acted = config.get("data") is None or bool(checkpoints.meta()["online"])
    shards = run.copies.get(REPLAY, 1)
    task = Task(found.spec, algorithm.num_envs, config["steps"], shards=shards, online=acted)
    kept = ServedReplay.rebuilt(config.get("replay"))
    if kept is not None:
        task = replace(task, served=kept.served(config.get("cluster") is not None))
    bound = algorithm.bind(task)
    like = {
        "state": jax.eval_shape(lambda key: all_shards(bound.init(key)), seed_key(0)),
        "actor": abstract_actor(bound, task, found.jax) if acted else (),
    }
    if settings.seeds > 1:
        like = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((settings.seeds, *s.shape), s.dtype), like
        )
    tree, meta = checkpoints.restore(like, expect={"algorithm": config["algorithm"]})
    params = seed_params(bound.acting(tree["state"]), settings.seeds)
    return Trained(bound, found, params, int(meta["updates"]))


def evaluate_run(
    run: Run | str | Path,
    episodes: int = 100,
    seed: int = 0,
    env: Any = None,
    record: str | Path | None = None,
    explore: bool = False,
) -> Evaluation:
    """Evaluates the policy of a run's last checkpoint; all seeds together if there are several.

    It acts greedily, or as in training if `explore`. `record` is the folder for a new dataset of
    these episodes.
    """
    enable_compile_cache()
    opened = run if isinstance(run, Run) else Run.open(run)
    trained = load_trained(opened, env)
    recorder = None
    if record is not None:
        recorder = _recorder(record, opened, trained, explore)
    found: list[Evaluation] = []
    with recorder or nullcontext():
        for number, params in enumerate(trained.params):
            show = None
            if recorder is not None:
                recorder.source = number
                show = partial(recorder.add, version=trained.updates)
            found.append(
                evaluate(
                    trained.algorithm,
                    params,
                    trained.env,
                    episodes=episodes,
                    seed=seed,
                    explore=explore,
                    record=show,
                )
            )
    return Evaluation(
        np.concatenate([one.returns for one in found]),
        np.concatenate([one.lengths for one in found]),
        sum(one.cut for one in found),
    )


def _recorder(folder: str | Path, run: Run, trained: Trained, explore: bool) -> Recorder:
    """The recorder of an evaluation's episodes, with one source per seed."""
    config = run.config
    sources = tuple(
        Source(
            environment=trained.env.spec.id,
            kind="evaluation",
            run=str(run.path),
            algorithm=config["algorithm"],
            seed=config["seed"] + number,
            dovetail=version_of("dovetail"),
        )
        for number in range(len(trained.params))
    )
    known = knows_probabilities(trained.algorithm, explore)
    return record_dataset(folder, trained.env, sources, log_probabilities=known)


def watch(
    run: Run | str | Path,
    out: str | Path | None = None,
    window: bool = False,
    seed: int = WATCH_SEED,
    env: Any = None,
) -> Path | None:
    """Records a video of the exported policy and returns its path; with `window`, shows it in a
    window and returns None."""
    opened = run if isinstance(run, Run) else Run.open(run)
    _, strategy, _ = rebuild_all(opened.config)
    found = _environment(opened, strategy, env)
    exported = load_policy(opened.path / "policy")
    if window:
        show_window(found, exported, seed)
        return None
    target = Path(out) if out is not None else opened.path / "video.mp4"
    video = record_video(found, exported, target, seed=seed)
    if video.path is None:
        raise UserError(video.reason or f"There is no video of {found.spec.id}.")
    return video.path


def lacks_environment(run: Run) -> bool:
    """Whether the run was trained on recorded data without an available environment."""
    return run.config.get("env_given") == "data"


def _environment(run: Run, strategy: Strategy, env: Any) -> Env:
    if env is None and run.config.get("env_given") == "object":
        raise UserError(
            f"{run.path} was trained on a Python object ({run.config['env']}): call this from "
            f"Python and give it again as env=…."
        )
    if env is None and lacks_environment(run):
        raise UserError(
            f"{run.path} was trained on recorded data without an environment: call this from "
            f"Python and give one as env=…."
        )
    return resolve(env if env is not None else run.config["env"], traced=strategy.traced_envs)
