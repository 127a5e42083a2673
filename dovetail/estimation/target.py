"""The policy whose worth is asked for: greedy, or greedy but for a share of random actions.

What it does at every row of a dataset is worked out once, episode by episode, so that policies
with a memory are judged as they would act.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.algorithm import Algorithm, Params, Timestep
from dovetail.data.blocks import whole_episodes
from dovetail.data.episode import Rows
from dovetail.data.reader import Reader
from dovetail.envs.interface import Discrete

STEPS = 1 << 15
"""Steps of episodes that are looked at together, about."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Target:
    """A bound algorithm with parameters, and how often it acts at random instead."""

    algorithm: Algorithm
    params: Params
    epsilon: float = 0.0
    """The share of actions that are drawn evenly; Discrete actions only."""

    def actions(self, reader: Reader) -> Array:
        """The greedy action at every row of the dataset [rows, …], last rows included."""
        act = jax.jit(partial(_greedy, self.algorithm))
        found: list[Array] = []
        for run in whole_episodes(reader.episodes.lengths, STEPS):
            rows = reader.rows(run.start, run.stop)
            grid, place = _grid(rows, reader.episodes.lengths[run.start : run.stop] + 1)
            found.append(np.asarray(act(self.params, grid))[place])
        return np.concatenate(found)

    def probabilities(self, greedy: Array, taken: Array) -> Array:
        """How probable it takes the actions `taken` where `greedy` are its own."""
        space = self.algorithm.task.env.action
        same = greedy == taken if isinstance(space, Discrete) else (greedy == taken).all(axis=-1)
        if self.epsilon == 0 or not isinstance(space, Discrete):
            return same.astype(np.float64)
        return (1 - self.epsilon) * same + self.epsilon / space.n


def _grid(rows: Rows, sizes: Array) -> tuple[Timestep, tuple[Array, Array]]:
    """Episodes side by side as [T, B, …], and where each row stands there.

    Both sizes are rounded up to powers of two, so that few shapes are compiled.
    """
    longest, count = (1 << int(np.ceil(np.log2(n))) for n in (sizes.max(), len(sizes)))
    column = np.repeat(np.arange(len(sizes)), sizes)
    step = np.arange(len(column)) - np.repeat(np.cumsum(sizes) - sizes, sizes)

    def spread(x: Array) -> Array:
        found = np.zeros((longest, count, *x.shape[1:]), x.dtype)
        found[step, column] = x
        return found

    before = np.roll(np.asarray(rows.reward, np.float32), 1)
    reward, first = np.where(step == 0, 0, before).astype(np.float32), step == 0
    grid = jax.tree.map(spread, Timestep(rows.observation, reward, first))  # type: ignore[arg-type]
    return grid, (step, column)


def _greedy(algorithm: Algorithm, params: Params, grid: Timestep) -> jax.Array:
    """The greedy actions [T, B, …]."""
    initial = algorithm.initial_carry()
    if not jax.tree.leaves(initial):
        return jax.vmap(jax.vmap(lambda step: algorithm.greedy(params, initial, step)[0]))(grid)

    def one(carry: Any, step: Timestep) -> tuple[Any, Any]:
        carry = jax.tree.map(lambda new, old: jnp.where(step.first, new, old), initial, carry)
        action, carry = algorithm.greedy(params, carry, step)
        return carry, action

    episode = jax.vmap(lambda steps: jax.lax.scan(one, initial, steps)[1], in_axes=1, out_axes=1)
    return episode(grid)
