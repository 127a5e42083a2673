"""The policy whose worth is asked for: greedy, or as it draws its actions; but for a share of
random ones.

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
from dovetail.batching import act_for_one, greedy_for_one
from dovetail.data.episode import Rows
from dovetail.data.reader import Reader
from dovetail.envs.interface import Discrete
from dovetail.estimation.parts import Array, parts, power, rows_at_once

DRAWS = 8
"""Actions that are drawn at every row, if they are drawn."""


class Followed(NamedTuple):
    """What a policy does at every row of a dataset, last rows included."""

    actions: Array
    """Its own [rows, draws, …]: one if it is greedy."""
    log_probability: Array
    """Of the recorded actions, by this policy [rows]; a density if they are Continuous."""


@dataclass(frozen=True)
class Target:
    """A bound algorithm with parameters, how it acts, and how often at random instead."""

    algorithm: Algorithm
    params: Params
    epsilon: float = 0.0
    """The share of actions that are drawn evenly; Discrete actions only."""
    sampled: bool = False
    """Whether the others are drawn as in training; the algorithm defines `log_prob` if so."""

    def follow(self, reader: Reader) -> Followed:
        """What it does at every row of the dataset."""
        act = jax.jit(partial(_followed, self.algorithm, self.sampled))
        initial, limit = self.algorithm.initial_carry(), 4 * rows_at_once(reader)
        found: list[Followed] = []
        for run in parts(reader):
            rows, sizes = reader.rows(run.start, run.stop), reader.episodes.lengths[run] + 1
            lanes = _lanes(sizes, beside=bool(jax.tree.leaves(initial)))
            carry = jax.tree.map(partial(_repeated, lanes.number), initial)
            begin = int(reader.episodes.lengths[: run.start].sum()) + run.start
            for window in _windows(rows, begin, sizes, lanes, limit):
                done, carry = act(self.params, carry, window.grid)
                if window.begins:
                    found.append(jax.tree.map(partial(_room, len(rows.reward)), done))
                for whole, some in zip(found[-1], done, strict=True):
                    whole[window.rows] = np.asarray(some)[window.place]
        actions, own = (np.concatenate(x) for x in zip(*found, strict=True))
        return Followed(actions, self._mixed(own.astype(np.float64)))

    def _mixed(self, own: Array) -> Array:
        """Log-probabilities, where a share of the actions is drawn evenly instead."""
        space = self.algorithm.task.env.action
        if self.epsilon == 0 or not isinstance(space, Discrete):
            return own
        return np.log((1 - self.epsilon) * np.exp(own) + self.epsilon / space.n)


def _repeated(count: int, x: Any) -> jax.Array:
    return jnp.broadcast_to(x, (count, *jnp.shape(x)))


def _room(rows: int, done: jax.Array) -> Array:
    """Zeros for as many rows as there are, each like what was done at one."""
    return np.zeros((rows, *done.shape[2:]), done.dtype)


class _Lanes(NamedTuple):
    """Where each row stands if episodes are put one behind another into lanes."""

    number: int
    lane: Array
    """[rows]"""
    step: Array
    """[rows]: its place in the lane."""


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


class _Seen(NamedTuple):
    """What is shown of a row."""

    timestep: Timestep
    taken: Any
    """The recorded action."""
    row: Any
    """Its number in the dataset."""


class _Window(NamedTuple):
    """Some steps of all lanes."""

    grid: _Seen
    """[T, lanes, …]"""
    rows: Array
    """The rows that stand in it."""
    place: tuple[Array, Array]
    """Where each of them stands."""
    begins: bool
    """Whether the lanes begin here."""


def _windows(rows: Rows, number: int, sizes: Array, lanes: _Lanes, limit: int) -> Iterator[_Window]:
    """Windows of at most `limit` places, in the order of time, of rows from `number` on."""
    first = np.zeros(len(lanes.step), np.bool_)
    first[np.cumsum(sizes) - sizes] = True
    reward = np.where(first, 0, np.roll(rows.reward, 1)).astype(np.float32)
    alone = np.zeros(len(first), np.int32)
    timestep = Timestep(rows.observation, reward, first, alone)  # type: ignore[arg-type]
    seen = _Seen(timestep, rows.action, number + np.arange(len(first), dtype=np.uint32))
    depth = int(lanes.step.max()) + 1
    length = min(power(depth), power(max(limit // lanes.number, 1) + 1) // 2)

    def spread(x: Array, rows: Array, place: tuple[Array, Array]) -> Array:
        found = np.zeros((length, lanes.number, *x.shape[1:]), x.dtype)
        found[place] = x[rows]
        return found

    for begin in range(0, depth, length):
        some = np.flatnonzero((lanes.step >= begin) & (lanes.step < begin + length))
        place = (lanes.step[some] - begin, lanes.lane[some])
        grid = jax.tree.map(partial(spread, rows=some, place=place), seen)
        yield _Window(grid, some, place, begin == 0)


def _followed(
    algorithm: Algorithm, sampled: bool, params: Params, carry: Any, grid: _Seen
) -> tuple[Followed, Any]:
    """What is done at [T, lanes], and the carry [lanes, …] behind it."""
    initial, choose = algorithm.initial_carry(), _drawn if sampled else _greedy

    def one(carry: Any, seen: _Seen) -> tuple[Any, Followed]:
        first = seen.timestep.first
        carry = jax.tree.map(lambda new, old: jnp.where(first, new, old), initial, carry)
        return choose(algorithm, params, carry, seen)

    if not jax.tree.leaves(initial):
        return jax.vmap(jax.vmap(lambda seen: one(initial, seen)[1]))(grid), carry
    lanes = jax.vmap(partial(jax.lax.scan, one), in_axes=(0, 1), out_axes=(0, 1))
    carry, done = lanes(carry, grid)
    return done, carry


def _greedy(algorithm: Algorithm, params: Params, carry: Any, seen: _Seen) -> tuple[Any, Followed]:
    """The best action at a row: it is certain."""
    action, carry = greedy_for_one(algorithm)(params, carry, seen.timestep)
    same = jnp.all(action == seen.taken)
    return carry, Followed(action[None], jnp.where(same, 0.0, -jnp.inf))  # type: ignore[arg-type]


def _drawn(algorithm: Algorithm, params: Params, carry: Any, seen: _Seen) -> tuple[Any, Followed]:
    """Some actions at a row, as in training."""
    log_prob = algorithm.log_prob(params, carry, seen.timestep, seen.taken)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), seen.row), DRAWS)
    one = act_for_one(algorithm)
    act = jax.vmap(lambda key: one(params, carry, seen.timestep, key)[::2])
    actions, carries = act(keys)
    return jax.tree.map(lambda x: x[0], carries), Followed(actions, log_prob)  # type: ignore[arg-type]
