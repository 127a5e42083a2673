"""Dovetail's IMPALA as plain threads and queues: actors step environments, the learner learns.

    python -m benchmarks.handwritten.threaded_impala --actors 1 --num-envs 64 --unroll 32 \
        --env gymnasium:CartPole-v1
    python -m benchmarks.handwritten.threaded_impala --actors 2 --env envpool:CartPole-v1

With an EnvPool of its own for each of several actor threads it is the structure that Sebulba made
known; with one thread over Gymnasium's vectorized CartPole, what a user would write who has two
cores. Acting and the update are one compiled call each. The queue holds `AHEAD` unrolls: what
Dovetail's staleness bound of 2 lets an actor run ahead.
"""

import queue
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.handwritten import impala_update as impala
from benchmarks.handwritten import ppo_update as ppo
from benchmarks.protocol import Job, parse_job, train_and_answer, train_on_the_clock
from dovetail.keys import seed_key

AHEAD = 2


@jax.jit
def act(params: Any, observation: jax.Array, keys: jax.Array, step: jax.Array) -> jax.Array:
    """Actions and their log-probabilities as one array of words."""
    folded = jax.vmap(jax.random.fold_in, (0, None))(keys, 2 * step)
    action, log_prob, _ = jax.vmap(ppo.act, (None, 0, 0))(params, observation, folded)
    return jnp.stack([action, jax.lax.bitcast_convert_type(log_prob, jnp.int32)])


@jax.jit
def value(params: Any, observation: jax.Array) -> jax.Array:
    return ppo.value(params, observation)


def make_envs(name: str, count: int, seed: int) -> tuple[Any, np.ndarray]:
    """`count` CartPoles as one vector environment, and what they show first."""
    if name.startswith("envpool:"):
        import envpool

        # the learner needs the other core: with a thread for each it is half as fast
        options = {"env_type": "gymnasium", "num_threads": 1}
        envs = envpool.make("CartPole-v1", num_envs=count, seed=seed, **options)
        return envs, envs.reset()[0]
    from dovetail.envs.gymnasium_cartpole import CartPoles

    envs = CartPoles(num_envs=count)
    return envs, envs.reset(seed=[seed + i for i in range(count)])[0].copy()


class Actor:
    """A thread that unrolls its own environments with the learner's newest weights."""

    def __init__(self, job: Job, number: int, learning: "Learning") -> None:
        self.count, self.unroll_length = job.envs // job.actors, job.unroll
        env_key = jax.random.fold_in(seed_key(job.seed), 1 + number)
        self.keys = jax.vmap(jax.random.fold_in, (None, 0))(env_key, np.arange(self.count))
        seed = 1000 * job.seed + number * self.count
        self.envs, self.observation = make_envs(job.env, self.count, seed)
        self.ended = np.zeros(self.count, bool)
        self.step = 0
        self.learning = learning
        self.made: queue.Queue[tuple[ppo.Batch, np.ndarray]] = queue.Queue(AHEAD)
        self.free: queue.SimpleQueue[ppo.Batch] = queue.SimpleQueue()
        for _ in range(AHEAD + 2):  # one is filled, one is learned from
            self.free.put(self.buffers())
        self.episodes = np.zeros(3)
        self._running = np.zeros((2, self.count))
        self.thread = threading.Thread(target=self.work, daemon=True)

    def buffers(self) -> ppo.Batch:
        def rows(dtype: Any, *shape: int) -> Any:
            return np.zeros((self.unroll_length, self.count, *shape), dtype)

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

    def work(self) -> None:
        while not self.learning.over:
            batch = self.free.get()
            self.unroll(self.learning.learner.params, batch)
            self.count_episodes(batch)
            self.made.put((batch, self.observation[None].copy()))

    def unroll(self, params: Any, batch: ppo.Batch) -> None:
        batch.bootstrap[:] = 0
        for t in range(self.unroll_length):
            observation = self.observation
            words = np.asarray(act(params, observation, self.keys, np.int32(self.step)))
            reals = words.view(np.float32)
            after, reward, terminated, truncated, _ = self.envs.step(words[0])
            truncated = truncated & ~terminated
            batch.observation[t], batch.action[t] = observation, words[0]
            batch.log_prob[t], batch.reward[t] = reals[1], reward
            batch.terminated[t], batch.truncated[t] = terminated, truncated
            batch.valid[t] = ~self.ended
            if truncated.any():
                batch.bootstrap[t][truncated] = np.asarray(value(params, after))[truncated]
            self.ended = terminated | truncated
            # the environment writes the next observation into the same array
            self.observation = after.copy()
            self.step += 1

    def count_episodes(self, batch: ppo.Batch) -> None:
        """How many episodes ended, and the sums of their returns and lengths."""
        done = batch.terminated | batch.truncated
        for t in range(self.unroll_length):
            self._running += (batch.reward[t] * batch.valid[t], batch.valid[t])
            if done[t].any():
                self.episodes += (done[t].sum(), *self._running[:, done[t]].sum(axis=1))
                self._running[:, done[t]] = 0


class Learning:
    """The learner, in the calling thread, and its actors."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.over = False
        self.learner = jax.jit(impala.init)(jax.random.fold_in(seed_key(job.seed), 0))
        self.update = jax.jit(impala.update)
        self.metrics: Any = None
        self.actors = [Actor(job, number, self) for number in range(job.actors)]
        for actor in self.actors:
            actor.thread.start()

    def iterate(self, count: int) -> int:
        """`count` updates, each from one unroll of every actor."""
        for _ in range(count):
            taken = [actor.made.get() for actor in self.actors]
            batch, last = taken[0]
            if len(taken) > 1:
                batch = ppo.Batch(
                    *(np.concatenate(x, axis=1) for x in zip(*(b for b, _ in taken), strict=True))
                )
                last = np.concatenate([shown for _, shown in taken], axis=1)
            self.learner, metrics = self.update(self.learner, batch, last)
            self.metrics = jax.tree.map(float, metrics)
            for actor, (used, _) in zip(self.actors, taken, strict=True):
                actor.free.put(used)
        return count * self.job.per_iteration

    def close(self) -> None:
        self.over = True
        for actor in self.actors:
            while actor.thread.is_alive():  # it may wait for a place in its queue
                while not actor.made.empty():
                    actor.free.put(actor.made.get()[0])
                actor.thread.join(0.01)


def main() -> None:
    job = parse_job()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    began = time.perf_counter()
    learning = Learning(job)
    greedy = lambda x: ppo.greedy(learning.learner.params, x)  # noqa: E731
    if job.mode == "threshold":  # so that compiling is not part of the training
        learning.iterate(1)
        greedy(np.zeros((100, 4), np.float32))
        learning.close()
        learning = Learning(job)
    compile_s = time.perf_counter() - began
    drive = train_and_answer if job.mode == "speed" else train_on_the_clock
    drive(job, learning.iterate, greedy, compile_s)
    learning.close()


if __name__ == "__main__":
    main()
