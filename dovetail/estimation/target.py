"""The policy whose worth is asked for: greedy, or greedy but for a share of random actions.

What it does at every row of a dataset is worked out once, episode by episode, so that policies
with a memory are judged as they would act.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.algorithm import Algorithm, Params, Timestep
from dovetail.data.episode import Rows
from dovetail.data.reader import Reader
from dovetail.envs.interface import Discrete
from dovetail.estimation.parts import Array, parts, power, rows_at_once


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
        initial, limit = self.algorithm.initial_carry(), 4 * rows_at_once(reader)
        found: list[Array] = []
        for run in parts(reader):
            rows, sizes = reader.rows(run.start, run.stop), reader.episodes.lengths[run] + 1
            lanes = _lanes(sizes, beside=bool(jax.tree.leaves(initial)))
            carry = jax.tree.map(partial(_repeated, lanes.count), initial)
            for window in _windows(rows, sizes, lanes, limit):
                actions, carry = act(self.params, carry, window.grid)
                done = np.asarray(actions)[window.place]
                if window.begins:
                    found.append(np.zeros((len(rows.reward), *done.shape[1:]), done.dtype))
                found[-1][window.rows] = done
        return np.concatenate(found)

    def probabilities(self, greedy: Array, taken: Array) -> Array:
        """How probable it takes the actions `taken` where `greedy` are its own."""
        space = self.algorithm.task.env.action
        same = greedy == taken if isinstance(space, Discrete) else (greedy == taken).all(axis=-1)
        if self.epsilon == 0 or not isinstance(space, Discrete):
            return same.astype(np.float64)
        return (1 - self.epsilon) * same + self.epsilon / space.n


def _repeated(count: int, x: Any) -> jax.Array:
    return jnp.broadcast_to(x, (count, *jnp.shape(x)))


class _Lanes(NamedTuple):
    """Where each row stands if episodes are put one behind another into lanes."""

    count: int
    lane: Array
    step: Array


def _lanes(sizes: Array, beside: bool) -> _Lanes:
    """Lanes of about equal length for episodes of `sizes` rows: one, or several `beside` each
    other, as many as the longest episode leaves room for."""
    total = int(sizes.sum())
    several = power(total // int(sizes.max()) + 1) // 2
    count = several if beside else 1
    starts = np.cumsum(sizes) - sizes
    lane = starts * count // total
    begins = starts[np.searchsorted(lane, lane)]
    return _Lanes(count, np.repeat(lane, sizes), np.arange(total) - np.repeat(begins, sizes))


class _Window(NamedTuple):
    """Some steps of all lanes."""

    grid: Timestep
    """[T, lanes, …]"""
    rows: Array
    """The rows that stand in it."""
    place: tuple[Array, Array]
    """Where each of them stands."""
    begins: bool
    """Whether the lanes begin here."""


def _windows(rows: Rows, sizes: Array, lanes: _Lanes, limit: int) -> Iterator[_Window]:
    """Windows of at most `limit` places, in the order of time."""
    first = np.zeros(len(lanes.step), np.bool_)
    first[np.cumsum(sizes) - sizes] = True
    reward = np.where(first, 0, np.roll(rows.reward, 1)).astype(np.float32)
    number = np.zeros(len(first), np.int32)
    seen = Timestep(rows.observation, reward, first, number)  # type: ignore[arg-type]
    depth = int(lanes.step.max()) + 1
    length = min(power(depth), power(max(limit // lanes.count, 1) + 1) // 2)

    def spread(x: Array, rows: Array, place: tuple[Array, Array]) -> Array:
        found = np.zeros((length, lanes.count, *x.shape[1:]), x.dtype)
        found[place] = x[rows]
        return found

    for begin in range(0, depth, length):
        some = np.flatnonzero((lanes.step >= begin) & (lanes.step < begin + length))
        place = (lanes.step[some] - begin, lanes.lane[some])
        grid = jax.tree.map(partial(spread, rows=some, place=place), seen)
        yield _Window(grid, some, place, begin == 0)


def _greedy(
    algorithm: Algorithm, params: Params, carry: Any, grid: Timestep
) -> tuple[jax.Array, Any]:
    """The greedy actions [T, lanes, …], and the carry [lanes, …] behind them."""
    initial = algorithm.initial_carry()

    def one(carry: Any, step: Timestep) -> tuple[Any, Any]:
        carry = jax.tree.map(lambda new, old: jnp.where(step.first, new, old), initial, carry)
        action, carry = algorithm.greedy(params, carry, step)
        return carry, action

    if not jax.tree.leaves(initial):
        return jax.vmap(jax.vmap(lambda step: one(initial, step)[1]))(grid), carry
    lanes = jax.vmap(partial(jax.lax.scan, one), in_axes=(0, 1), out_axes=(0, 1))
    carry, actions = lanes(carry, grid)
    return actions, carry
