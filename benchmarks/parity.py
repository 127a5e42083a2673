"""Whether the hand-written programs compute what Dovetail does: the same weights, to rounding.

A comparison of speed means something only between programs that do the same work.
"""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dovetail as dt
from benchmarks import ours
from benchmarks.handwritten import fused_ppo, impala_update, ppo_update
from benchmarks.protocol import Job
from dovetail.algorithm import Task, Timestep, Trajectory
from dovetail.blocks.actor_critic import ActorCarry, ActorCriticExtras

UPDATES = 5


def difference(mine: Any, theirs: Any) -> float:
    """The largest of any weight."""
    pairs = zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def fused() -> float:
    """Whole iterations of fused PPO."""
    job = Job("threshold", 64, 10**6, seed=0, threads=1, devices=1, env="dovetail:CartPole-v1")
    chosen = dataclasses.replace(ours.algorithm(), num_envs=job.envs)
    training = ours.Training(job, chosen, dt.strategies.Fused())
    env = dt.envs.resolve(job.env, traced=True).jax
    learner, actors = jax.jit(lambda: fused_ppo.start(env, job.envs, job.seed))()
    program = jax.jit(lambda *state: fused_ppo.many_iterations(env, *state))
    learner, *_ = program(learner, actors, np.int32(UPDATES))
    training.iterate(UPDATES)
    training.close()
    return difference(training.state.params, learner.params)


def impala() -> float:
    """Updates of IMPALA from the same random batches."""
    spec = dt.envs.resolve("dovetail:CartPole-v1", traced=True).spec
    algorithm = ours.algorithm("impala", 32).bind(Task(spec, 16, 10**6))
    state, learner = algorithm.init(jax.random.key(0)), impala_update.init(jax.random.key(0))
    alone: Any = SimpleNamespace(mean=lambda tree: tree)
    learn = jax.jit(lambda state, batch: algorithm.learn(alone, state, batch)[0])
    update = jax.jit(lambda *arguments: impala_update.update(*arguments)[0])
    for seed in range(UPDATES):
        batch, last = random_batch(np.random.default_rng(seed), 32, 16)
        state, learner = learn(state, trajectory(batch, last)), update(learner, batch, last)
    return difference(state.params, learner.params)


def random_batch(random: np.random.Generator, length: int, envs: int) -> Any:
    shape = (length, envs)
    terminated = random.random(shape) < 0.05
    truncated = (random.random(shape) < 0.05) & ~terminated
    batch = ppo_update.Batch(
        observation=random.normal(size=(*shape, 4)).astype(np.float32),
        action=random.integers(0, 2, shape, np.int32),
        log_prob=np.log(random.uniform(0.2, 0.8, shape)).astype(np.float32),
        value=np.zeros(shape, np.float32),
        reward=random.normal(size=shape).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        valid=random.random(shape) < 0.9,
        bootstrap=np.where(truncated, random.normal(size=shape), 0).astype(np.float32),
    )
    return batch, random.normal(size=(1, envs, 4)).astype(np.float32)


def trajectory(batch: Any, last: np.ndarray) -> Trajectory:
    """The same batch in Dovetail's form."""
    nothing = jnp.zeros((1, last.shape[1]))
    return Trajectory(
        observation=batch.observation,
        action=batch.action,
        reward=batch.reward,
        terminated=batch.terminated,
        truncated=batch.truncated,
        first=jnp.zeros_like(batch.valid),
        valid=batch.valid,
        next_observation=batch.observation,
        extras=ActorCriticExtras(batch.log_prob, batch.value, ()),
        bootstrap=batch.bootstrap,
        carry=ActorCarry((), ()),
        last=Timestep(last, nothing, nothing > 0),
    )


def main() -> None:
    found = {"fused PPO": fused(), "IMPALA": impala()}
    for name, largest in found.items():
        print(f"{name}: largest difference of any weight after {UPDATES} updates: {largest:g}")
    print(json.dumps({"updates": UPDATES, "largest_difference": found}))


if __name__ == "__main__":
    main()
