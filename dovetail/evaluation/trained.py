"""Loads and evaluates the policy of an existing run."""

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
from dovetail.evaluation.kept import BEST, Which, check_which, has_best, read_best
from dovetail.evaluation.play import knows_probabilities
from dovetail.graph.trace import abstract_actor
from dovetail.keys import seed_key
from dovetail.replay.replay import all_shards
from dovetail.run.checkpoint import Checkpoints, version_of
from dovetail.run.folder import Run
from dovetail.strategies.interface import Strategy
from dovetail.training.config import rebuild_all, refuse_missing
from dovetail.training.finish import seed_params
from dovetail.training.replay_servers import ServedReplay
from dovetail.training.start import enable_compile_cache


class Trained(NamedTuple):
    """The policy of a run."""

    algorithm: Algorithm
    env: Env
    params: list[Params]
    """One set for each seed."""
    updates: int
    """Number of learner updates: the version of the weights."""
    env_steps: int
    which: Which
    """Which policy of the run it is."""


def load_trained(
    run: Run,
    env: Any = None,
    instead: EnvSpec | None = None,
    *,
    which: Which | None = None,
    algorithm: type | str | None = None,
    trust: bool = False,
) -> Trained:
    """Loads the algorithm, environment and parameters of a run's policy.

    Unless `which` says otherwise it is the best one, or the last if nothing was evaluated or there
    are several seeds. `instead` describes the observations and actions if the run had no
    environment; it suffices for callers that never step one. `algorithm` is the class, or
    "file.py:Name", if the run's own is no longer found. `trust` allows code that the run's config
    names.
    """
    check_which(which)
    config = run.config
    made, strategy, settings = rebuild_all(config, algorithm, trust, env)
    if env is None and instead is not None and lacks_environment(run):
        env = Env(instead, None, None)
    found = find_environment(run, strategy, env)
    if which is None:
        which = "best" if has_best(run) and settings.seeds == 1 else "last"
    if which == "best":
        return _best(run, made.bind(Task(found.spec, made.num_envs, config["steps"])), found)
    checkpoints = Checkpoints(run.path / "checkpoints", settings.keep)
    number = None if which == "last" else which
    acted = config.get("data") is None or bool(checkpoints.meta(number)["online"])
    shards = run.copies.get(REPLAY, 1)
    task = Task(found.spec, made.num_envs, config["steps"], shards=shards, online=acted)
    kept = ServedReplay.rebuilt(config.get("replay"))
    if kept is not None:
        task = replace(task, served=kept.served(config.get("cluster") is not None))
    bound = made.bind(task)
    like = {
        "state": jax.eval_shape(lambda key: all_shards(bound.init(key)), seed_key(0)),
        "actor": abstract_actor(bound, task, found.jax) if acted else (),
    }
    if settings.seeds > 1:
        like = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((settings.seeds, *s.shape), s.dtype), like
        )
    tree, meta = checkpoints.restore(like, number, expect={"algorithm": config["algorithm"]})
    params = seed_params(bound.acting(tree["state"]), settings.seeds)
    return Trained(bound, found, params, int(meta["updates"]), int(meta["env_steps"]), which)


def _best(run: Run, bound: Algorithm, env: Env) -> Trained:
    """The best policy, with its parameters as the algorithm has them."""
    exported = read_best(run)
    like = jax.eval_shape(lambda key: bound.acting(bound.init(key)), seed_key(0))
    tensors = exported.tensors()
    leaves = [tensors[entry["name"]] for entry in exported.record["params"]]
    if [(x.shape, x.dtype) for x in leaves] != [(x.shape, x.dtype) for x in jax.tree.leaves(like)]:
        raise UserError(
            f"The best policy in {run.path / BEST} does not fit {type(bound).__name__} with the "
            "run's options: the algorithm has changed; load the policy with dovetail.load."
        )
    params = jax.tree.unflatten(jax.tree.structure(like), [jax.numpy.asarray(x) for x in leaves])
    origin = exported.origin
    return Trained(bound, env, [params], origin.updates, origin.env_steps, "best")


def evaluate_run(
    run: Run | str | Path,
    episodes: int = 100,
    seed: int = 0,
    env: Any = None,
    record: str | Path | None = None,
    explore: bool = False,
    *,
    which: Which | None = None,
    algorithm: type | str | None = None,
    trust: bool = False,
) -> Evaluation:
    """Evaluates a run's policy: the best one, or the last if nothing was evaluated in training.

    `which` is "best", "last" or the number of a checkpoint. With several seeds the default is
    "last", the policies of all seeds together. It acts greedily, or as in training if `explore`.
    `record` is the folder for a new dataset of these episodes. `env` and `algorithm` (a class, or
    "file.py:Name") are needed if the run's own are no longer found. `trust` allows the code that
    the run's config names, if it was made elsewhere.
    """
    enable_compile_cache()
    opened = run if isinstance(run, Run) else Run.open(run)
    trained = load_trained(opened, env, which=which, algorithm=algorithm, trust=trust)
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
        trained.which,
        trained.env_steps,
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


def lacks_environment(run: Run) -> bool:
    """Whether the run was trained on recorded data without an available environment."""
    return run.config.get("env_given") == "data"


def find_environment(run: Run, strategy: Strategy, env: Any) -> Env:
    """The environment given, or the run's own."""
    if env is None and run.config.get("env_given") == "object":
        raise UserError(
            f"{run.path} was trained on a Python object ({run.config['env']}): call this from "
            f"Python and give it again as env=…."
        )
    if env is None and lacks_environment(run):
        raise UserError(
            f"{run.path} was trained on recorded data without an environment: give one with --env, "
            "in Python as env=…."
        )
    if env is None:
        refuse_missing(run.config["env"], "env")
    return resolve(env if env is not None else run.config["env"], traced=strategy.traced_envs)
