"""What a finished run can do: be evaluated again, be watched."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dovetail.algorithm import Algorithm, Params, Task
from dovetail.checkpoint import Checkpoints
from dovetail.envs.resolve import Env, resolve
from dovetail.errors import UserError
from dovetail.evaluation import Evaluation, evaluate
from dovetail.export import load_policy
from dovetail.graph.trace import abstract_actor
from dovetail.keys import seed_key
from dovetail.policies.interface import Policy
from dovetail.replay.replay import all_shards
from dovetail.run import Run
from dovetail.telemetry.video import record_video, show_window
from dovetail.training.config import rebuild_all
from dovetail.training.finish import seed_params
from dovetail.training.start import enable_compile_cache

WATCH_SEED = 1_000_003
"""Seeds of what is watched: neither training's nor evaluation's."""


class Trained(NamedTuple):
    """A run's policy as its last checkpoint has it."""

    algorithm: Algorithm
    env: Env
    params: list[Params]
    """One for each seed."""


def load_trained(run: Run, env: Any = None) -> Trained:
    """The algorithm, environment and parameters of a run's last checkpoint."""
    config = run.config
    algorithm, policy, settings = rebuild_all(config)
    found = _environment(run, policy, env)
    task = Task(found.spec, policy.envs, config["steps"], shards=policy.split.shards)
    bound = algorithm.bind(task)
    like = {
        "state": jax.eval_shape(lambda key: all_shards(bound.init(key)), seed_key(0)),
        "actor": abstract_actor(bound, task, found.jax),
    }
    if settings.seeds > 1:
        like = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((settings.seeds, *s.shape), s.dtype), like
        )
    checkpoints = Checkpoints(run.path / "checkpoints", settings.keep)
    tree, _ = checkpoints.restore(like, expect={"algorithm": config["algorithm"]})
    return Trained(bound, found, seed_params(bound.acting(tree["state"]), settings.seeds))


def evaluate_run(
    run: Run | str | Path, episodes: int = 100, seed: int = 0, env: Any = None
) -> Evaluation:
    """The greedy policy's returns, of the last checkpoint; all seeds' together if several."""
    enable_compile_cache()
    trained = load_trained(run if isinstance(run, Run) else Run.open(run), env)
    found = [
        evaluate(trained.algorithm, params, trained.env, episodes=episodes, seed=seed)
        for params in trained.params
    ]
    return Evaluation(
        np.concatenate([one.returns for one in found]),
        np.concatenate([one.lengths for one in found]),
        sum(one.cut for one in found),
    )


def watch(
    run: Run | str | Path,
    out: str | Path | None = None,
    window: bool = False,
    seed: int = WATCH_SEED,
    env: Any = None,
) -> Path | None:
    """A video of the exported policy at work, or a window that shows it (and no file)."""
    opened = run if isinstance(run, Run) else Run.open(run)
    _, policy, _ = rebuild_all(opened.config)
    found = _environment(opened, policy, env)
    exported = load_policy(opened.path / "policy")
    if window:
        show_window(found, exported, seed)
        return None
    target = Path(out) if out is not None else opened.path / "video.mp4"
    video = record_video(found, exported, target, seed=seed)
    if video.path is None:
        raise UserError(video.reason or f"There is no video of {found.spec.id}.")
    return video.path


def _environment(run: Run, policy: Policy, env: Any) -> Env:
    if env is None and run.config.get("env_given") == "object":
        raise UserError(
            f"{run.path} was trained on a Python object ({run.config['env']}): call this from "
            f"Python and give it again as env=…."
        )
    return resolve(env if env is not None else run.config["env"], traced=policy.traced_envs)
