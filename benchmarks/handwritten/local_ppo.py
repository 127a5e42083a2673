"""Dovetail's PPO as a hand-written loop over the same Gymnasium vector environment.

    python -m benchmarks.handwritten.local_ppo --num-envs 8 --total-steps 200000

Acting and the whole update are one compiled call each, run in the calling thread; rows are written
into numpy buffers. What Dovetail's Local policy should cost next to nothing against.
"""

import time
from typing import Any

import jax
import numpy as np

from benchmarks.handwritten import ppo_update as ppo
from benchmarks.protocol import UNROLL, parse_job, train_and_answer
from dovetail.envs.gymnasium_cartpole import CartPoles
from dovetail.keys import seed_key


@jax.jit
def act(params: Any, observation: jax.Array, keys: jax.Array, step: jax.Array) -> tuple[Any, ...]:
    folded = jax.vmap(jax.random.fold_in, (0, None))(keys, 2 * step)
    return jax.vmap(ppo.act, (None, 0, 0))(params, observation, folded)


@jax.jit
def value(params: Any, observation: jax.Array) -> jax.Array:
    return ppo.value(params, observation)


def buffers(num_envs: int) -> ppo.Batch:
    def rows(dtype: Any, *shape: int) -> Any:
        return np.zeros((UNROLL, num_envs, *shape), dtype)

    real, flag = np.float32, np.bool_
    return ppo.Batch(
        observation=rows(real, 4),
        action=rows(np.int32),
        log_prob=rows(real),
        value=rows(real),
        reward=rows(real),
        terminated=rows(flag),
        truncated=rows(flag),
        valid=rows(flag),
        bootstrap=rows(real),
    )


class Training:
    """The environments, the learner and what is kept between two unrolls."""

    def __init__(self, num_envs: int, seed: int) -> None:
        key = seed_key(seed)
        self.learner = jax.jit(ppo.init)(jax.random.fold_in(key, 0))
        env_key = jax.random.fold_in(key, 1)
        self.keys = jax.vmap(jax.random.fold_in, (None, 0))(env_key, np.arange(num_envs))
        self.envs = CartPoles(num_envs=num_envs)
        self.observation, _ = self.envs.reset(seed=[seed * 1000 + i for i in range(num_envs)])
        self.ended = np.zeros(num_envs, bool)
        self.step = 0
        self.batches = [buffers(num_envs), buffers(num_envs)]
        self.update = jax.jit(ppo.update)
        self.metrics: dict[str, jax.Array] = {}
        self.episodes = np.zeros(3)
        self._running = np.zeros((2, num_envs))

    def iterate(self, count: int) -> None:
        for _ in range(count):
            self.batches.reverse()
            batch = self.batches[0]
            self.unroll(batch)
            self.learner, self.metrics = self.update(self.learner, batch)
        jax.block_until_ready(self.metrics)

    def unroll(self, batch: ppo.Batch) -> None:
        params = self.learner.params
        batch.bootstrap[:] = 0
        for t in range(UNROLL):
            observation = self.observation
            outputs = act(params, observation, self.keys, np.int32(self.step))
            action, log_prob, state_value = (np.asarray(x) for x in outputs)
            after, reward, terminated, truncated, _ = self.envs.step(action)
            truncated = truncated & ~terminated
            batch.observation[t], batch.action[t] = observation, action
            batch.log_prob[t], batch.value[t], batch.reward[t] = log_prob, state_value, reward
            batch.terminated[t], batch.truncated[t] = terminated, truncated
            batch.valid[t] = ~self.ended
            if truncated.any():
                batch.bootstrap[t][truncated] = np.asarray(value(params, after))[truncated]
            self.ended = terminated | truncated
            # the environment writes the next observation into the same array
            self.observation = after.copy()
            self.step += 1
        beyond = np.asarray(value(params, self.observation))
        ongoing = ~batch.truncated[-1]
        batch.bootstrap[-1][ongoing] = beyond[ongoing]
        self.count_episodes(batch)

    def count_episodes(self, batch: ppo.Batch) -> None:
        """How many episodes ended, and the sums of their returns and lengths."""
        for t in range(UNROLL):
            self._running += (batch.reward[t] * batch.valid[t], batch.valid[t])
            done = batch.terminated[t] | batch.truncated[t]
            if done.any():
                self.episodes += (done.sum(), *self._running[:, done].sum(axis=1))
                self._running[:, done] = 0


def main() -> None:
    job = parse_job()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    began = time.perf_counter()
    training = Training(job.envs, job.seed)
    if job.mode == "threshold":  # so that compiling is not part of the training
        training.iterate(1)
        training = Training(job.envs, job.seed)
    compile_s = time.perf_counter() - began
    train_and_answer(
        job, training.iterate, lambda x: ppo.greedy(training.learner.params, x), compile_s
    )


if __name__ == "__main__":
    main()
