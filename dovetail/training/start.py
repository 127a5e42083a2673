"""The start of a run: the compile cache and the initial states of learner and actors."""

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.algorithm import Algorithm
from dovetail.envs import batched
from dovetail.envs.interface import JaxEnv
from dovetail.graph.trace import abstract_actor
from dovetail.graph.unroll import ActorState, environment_keys, initial_actor
from dovetail.keys import seed_key
from dovetail.replay.data import Data, is_data, with_data, without_data
from dovetail.replay.replay import all_shards


def enable_compile_cache() -> None:
    """Caches compiled programs on disk, so that a second run starts without compiling."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", str(Path(root) / "dovetail" / "compiled"))
    # By default JAX does not cache programs that are small or compile quickly.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def first_state(
    algorithm: Algorithm,
    env: JaxEnv | None,
    num_envs: int,
    seed: int,
    seeds: int = 1,
    data: Data | None = None,
) -> tuple[Any, ActorState]:
    """Returns the states of learner and actors before the first iteration.

    `data` are recorded steps, stored in the learner's state. `env` is None for host environments;
    their observations are zero until the first reset. With several seeds every leaf has a leading
    seed axis, except recorded steps.
    """
    if env is None and seeds == 1:
        keys, state = _compiled(lambda key: _keys_and_state(algorithm, num_envs, key))(
            seed_key(seed)
        )
        observation = jax.tree.map(
            lambda s: np.zeros((num_envs, *s.shape), s.dtype), algorithm.task.env.observation
        )
        actor = initial_actor((), observation, algorithm.initial_carry(), keys)
        return with_data(state, data), actor
    one = partial(_traced_state, algorithm, env, num_envs)
    begin = _compiled(one)
    if seeds == 1:
        state, actor = begin(seed_key(seed))
        return with_data(state, data), actor
    # Not vmapped over seeds: orthogonal weights become a batched QR, which can hang XLA's CPU pool.
    states = [begin(seed_key(seed + i)) for i in range(seeds)]
    stack = _compiled(lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees))
    state, actor = stack(*states)
    return with_data(state, data), actor


def shapes(algorithm: Algorithm, env: JaxEnv | None, num_envs: int, seeds: int) -> tuple[Any, Any]:
    """The shapes of `first_state`, without computing it."""
    if env is None and seeds == 1:
        task = dataclasses.replace(algorithm.task, num_envs=num_envs)
        state = jax.eval_shape(lambda key: all_shards(algorithm.init(key)), seed_key(0))
        return state, abstract_actor(algorithm, task, None)
    one = partial(_traced_state, algorithm, env, num_envs)
    if seeds == 1:
        state, actor = jax.eval_shape(one, seed_key(0))
    else:
        # Shapes only: the batched QR is never run.
        state, actor = jax.eval_shape(jax.vmap(one), jax.vmap(seed_key)(jnp.arange(seeds)))
    if algorithm.task.data is None:
        return state, actor
    whole = jax.eval_shape(algorithm.init, seed_key(0))
    found = next(part for part in jax.tree.leaves(whole, is_leaf=is_data) if is_data(part))
    return with_data(state, found), actor


def _keys_and_state(algorithm: Algorithm, num_envs: int, key: jax.Array) -> tuple[jax.Array, Any]:
    # Separate random streams for the environments and the learner.
    keys = environment_keys(jax.random.fold_in(key, 1), num_envs)
    state = without_data(algorithm.init(jax.random.fold_in(key, 0)))
    return keys, all_shards(state)


def _traced_state(
    algorithm: Algorithm, env: JaxEnv | None, num_envs: int, key: jax.Array
) -> tuple[Any, ActorState]:
    keys, state = _keys_and_state(algorithm, num_envs, key)
    if env is None:  # an offline phase: a fused plan with a host environment cannot act
        seen = algorithm.task.env.observation
        env_state: Any = ()
        observation = jax.tree.map(lambda s: jnp.zeros((num_envs, *s.shape), s.dtype), seen)
    else:
        env_state, observation = batched.reset(env, keys)
    return state, initial_actor(env_state, observation, algorithm.initial_carry(), keys)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles without optimization: the function runs once, and optimizing would take longer."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def resumed_keys(actor: ActorState, updates: int) -> jax.Array:
    """Keys for the new episodes of host environments in a resumed run, [num_envs].

    Folding in the number of updates keeps a resumed run from repeating its first episodes.
    """
    return jax.vmap(jax.random.fold_in, (0, None))(actor.keys, updates)
