"""An algorithm's gradient step alone, many in one compiled loop, on one batch: without environment,
acting and replay, and without a call for each. Whoever does these as well cannot be faster.

    python -m benchmarks.alone --algorithm sac --total-steps 100 [--cores 1] [--parts 2]
"""

import argparse
import os
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dovetail as dt
from benchmarks import ours
from benchmarks import protocol as p
from dovetail.algorithms import TD3, TD3BC
from dovetail.blocks.gradient_loop import KEYS
from dovetail.blocks.replayed import Batch

ENVS = {
    "sac": "gymnasium:Pendulum-v1",
    "td3": "gymnasium:Pendulum-v1",
    "iql": "gymnasium:HalfCheetah-v5",
    "td3-bc": "gymnasium:HalfCheetah-v5",
}
ALONE: Any = SimpleNamespace(mean=lambda tree: tree)
"""The boundaries of a gradient step, for one learner."""


def bound(name: str, parts: int = 1) -> Any:
    """An algorithm with the options that are the same for everybody, and its task; with one of
    `parts` equal parts of a batch."""
    task = dt.Task(dt.envs.resolve(ENVS[name]).spec, num_envs=1, steps=1)
    chosen = ours.algorithm(name, 1)
    return replace(chosen, batch_size=chosen.batch_size // parts).bind(task)


def batch_shapes(algorithm: Any) -> Batch:
    """The shapes of what a gradient step learns from."""
    spec, count = algorithm.task.env, algorithm.batch_size
    rows = lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), jnp.float32)  # noqa: E731
    action = jax.ShapeDtypeStruct((getattr(spec.action, "size", 1),), jnp.float32)
    number = jax.ShapeDtypeStruct((), jnp.float32)
    return Batch(*map(rows, (spec.observation, action, number, number, spec.observation, number)))


def gradient_step(algorithm: Any, state: Any, batch: Batch, keys: Any) -> Any:
    """(state, errors, metrics) after a gradient step on one batch."""
    if isinstance(algorithm, TD3 | TD3BC):  # these compute their targets before the step
        one = jax.tree.map(lambda x: x[None], (batch, keys))
        batch = jax.tree.map(lambda x: x[0], algorithm.with_goals(state, *one))
    return algorithm.gradient_step(ALONE, state, batch, keys)


class Alone:
    """The learner's state, and a loop that changes it."""

    def __init__(self, algorithm: Any) -> None:
        draw, shapes = np.random.default_rng(0).uniform, batch_shapes(algorithm)
        batch = jax.tree.map(lambda s: draw(-1, 1, s.shape).astype(s.dtype), shapes)
        keys = jax.random.split(jax.random.key(1), KEYS)
        begun = algorithm.init(jax.random.key(0))._replace(replay=(), data=(), key=())  # type: ignore[arg-type]

        def step(_: Any, state: Any) -> Any:
            state = gradient_step(algorithm, state, batch, keys)[0]
            return state._replace(steps=state.steps + 1)

        @partial(jax.jit, donate_argnums=0)
        def steps(state: Any, count: int) -> Any:
            return jax.lax.fori_loop(0, count, step, state)

        self._steps = steps
        self._state = steps(jax.tree.map(jnp.copy, begun), 1)

    def iterate(self, count: int) -> None:
        """So many gradient steps, in one call."""
        self._state = jax.block_until_ready(self._steps(self._state, count))


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--algorithm", choices=tuple(ENVS), default="sac")
    parser.add_argument("--cores", type=int, help="that it may use, of those that there are")
    parser.add_argument("--parts", type=int, default=1, help="of a batch, of which it has one")
    options, sys.argv[1:] = parser.parse_known_args()
    job = p.parse_job()
    if options.cores:  # before JAX starts: it makes a thread for each
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as under Local
    p.train_and_answer(
        job, Alone(bound(options.algorithm, options.parts)).iterate, lambda observation: observation
    )


if __name__ == "__main__":
    main()
