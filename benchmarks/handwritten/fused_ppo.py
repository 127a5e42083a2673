"""Dovetail's PPO as one hand-written JAX program: environment, acting and learning in one scan.

    python -m benchmarks.handwritten.fused_ppo --num-envs 64 --total-steps 2000000

The same network, environment, random keys (one per environment, folded with the step number),
autoreset, bootstrap at time limits, episode statistics and metrics: what Dovetail's Fused policy
should cost nothing against.
"""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.handwritten import ppo_update as ppo
from benchmarks.protocol import UNROLL, parse_job, train_and_answer
from dovetail.envs.interface import JaxEnv
from dovetail.envs.resolve import resolve
from dovetail.keys import seed_key


class Actors(NamedTuple):
    """Every environment between two steps, [B, …]."""

    env: Any
    observation: jax.Array
    keys: jax.Array
    step: jax.Array
    episode_return: jax.Array
    episode_length: jax.Array


class Statistics(NamedTuple):
    """Sums over the episodes that ended, [B]."""

    ended: jax.Array
    returns: jax.Array
    lengths: jax.Array


def start(env: JaxEnv, num_envs: int, seed: int) -> tuple[ppo.Learner, Actors]:
    key = seed_key(seed)
    env_key = jax.random.fold_in(key, 1)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(env_key, jnp.arange(num_envs))
    state, observation = jax.vmap(env.reset)(keys)
    zero, none = jnp.zeros(num_envs), jnp.zeros(num_envs, jnp.int32)
    learner = ppo.init(jax.random.fold_in(key, 0))
    return learner, Actors(state, observation, keys, none, zero, none)


def env_step(env: JaxEnv, state: Any, action: jax.Array, keys: jax.Array) -> tuple[Any, ...]:
    """A transition in every environment; finished episodes begin anew."""
    step_keys, reset_keys = jax.vmap(jax.random.split, out_axes=1)(keys)
    after = jax.vmap(env.step)(state, action, step_keys)
    truncated = after.truncated & ~after.terminated
    done = after.terminated | truncated
    going_on = (after.state, after.observation)

    def begin_anew() -> Any:
        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(done.reshape(done.shape + (1,) * (old.ndim - 1)), new, old)

        return jax.tree.map(choose, jax.vmap(env.reset)(reset_keys), going_on)

    state, observation = jax.lax.cond(done.any(), begin_anew, lambda: going_on)
    return state, observation, after, truncated, done


def unroll(env: JaxEnv, params: Any, actors: Actors) -> tuple[ppo.Batch, Actors, Statistics]:
    fold = jax.vmap(jax.random.fold_in)
    values = jax.vmap(ppo.value, (None, 0))

    def step(carry: tuple[Actors, Statistics], _: None) -> tuple[Any, ppo.Batch]:
        actors, statistics = carry
        acting = fold(actors.keys, 2 * actors.step)
        stepping = fold(actors.keys, 2 * actors.step + 1)
        action, log_prob, value = jax.vmap(ppo.act, (None, 0, 0))(
            params, actors.observation, acting
        )
        state, observation, after, truncated, done = env_step(env, actors.env, action, stepping)
        bootstrap = jax.lax.cond(
            truncated.any(),
            lambda: jnp.where(truncated, values(params, after.observation), 0.0),
            lambda: jnp.zeros_like(value),
        )
        returns = actors.episode_return + after.reward
        lengths = actors.episode_length + 1
        ended = Statistics(
            done.astype(jnp.int32), jnp.where(done, returns, 0), jnp.where(done, lengths, 0)
        )
        following = Actors(
            state,
            observation,
            actors.keys,
            actors.step + 1,
            jnp.where(done, 0, returns),
            jnp.where(done, 0, lengths),
        )
        row = ppo.Batch(
            actors.observation,
            action,
            log_prob,
            value,
            after.reward,
            after.terminated,
            truncated,
            jnp.ones_like(done),
            bootstrap,
        )
        return (following, jax.tree.map(jnp.add, statistics, ended)), row

    none = jnp.zeros_like(actors.step)
    nothing = Statistics(none, jnp.zeros_like(actors.episode_return), none)
    (actors, statistics), batch = jax.lax.scan(step, (actors, nothing), length=UNROLL)
    beyond = values(params, actors.observation)
    last = jnp.where(batch.truncated[-1], batch.bootstrap[-1], beyond)
    return batch._replace(bootstrap=batch.bootstrap.at[-1].set(last)), actors, statistics


def many_iterations(env: JaxEnv, learner: ppo.Learner, actors: Actors, count: jax.Array) -> Any:
    """`count` iterations, with metrics and episode statistics summed over them."""

    def once(learner: ppo.Learner, actors: Actors) -> tuple[Any, ...]:
        batch, actors, statistics = unroll(env, learner.params, actors)
        learner, metrics = ppo.update(learner, batch)
        return learner, actors, metrics, statistics

    def body(_: jax.Array, loop: tuple[Any, ...]) -> tuple[Any, ...]:
        learner, actors, *sums = loop
        learner, actors, *new = once(learner, actors)
        return (learner, actors, *jax.tree.map(jnp.add, sums, new))

    shapes = jax.eval_shape(once, learner, actors)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[2:])
    return jax.lax.fori_loop(0, count, body, (learner, actors, *zeros))


def main() -> None:
    job = parse_job()
    env = resolve(job.env, traced=True).jax
    assert env is not None
    learner, actors = jax.jit(lambda: start(env, job.envs, job.seed))()
    began = time.perf_counter()
    program = jax.jit(lambda *state: many_iterations(env, *state))
    program = program.lower(learner, actors, np.int32(1)).compile()
    compile_s = time.perf_counter() - began
    state = [learner, actors]

    def iterate(count: int) -> None:
        state[0], state[1], metrics, _ = program(*state, np.int32(count))
        jax.block_until_ready(metrics)

    train_and_answer(job, iterate, lambda x: ppo.greedy(state[0].params, x), compile_s)


if __name__ == "__main__":
    main()
