"""The policy to evaluate: greedy or sampled, with an optional fraction of random actions.

Its actions at every row of a dataset are computed once, episode by episode, so that recurrent
policies are evaluated as they would act.
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
"""Actions sampled per row, if the policy samples."""


class Followed(NamedTuple):
    """A policy's behavior at every row of a dataset, including the last rows of episodes."""

    actions: Array
    """Its actions [rows, draws, …]; one draw if it is greedy."""
    log_probability: Array
    """Of the recorded actions under this policy [rows]; log-densities if they are Continuous."""


@dataclass(frozen=True)
class Target:
    """A bound algorithm with parameters, how it acts, and its fraction of random actions."""

    algorithm: Algorithm
    params: Params
    epsilon: float = 0.0
    """Fraction of uniformly random actions; Discrete actions only."""
    sampled: bool = False
    """Whether the others are sampled as in training; the algorithm must define `log_prob`."""

    def follow(self, reader: Reader) -> Followed:
        """Its behavior at every row of the dataset."""
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
        """Log-probabilities with a fraction `epsilon` of the actions uniformly random."""
        space = self.algorithm.task.env.action
        if self.epsilon == 0 or not isinstance(space, Discrete):
            return own
        return np.log((1 - self.epsilon) * np.exp(own) + self.epsilon / space.n)


def _repeated(count: int, x: Any) -> jax.Array:
    return jnp.broadcast_to(x, (count, *jnp.shape(x)))


def _room(rows: int, done: jax.Array) -> Array:
    """Zeros for `rows` rows, shaped like one row of `done`."""
    return np.zeros((rows, *done.shape[2:]), done.dtype)


class _Lanes(NamedTuple):
    """The position of each row when episodes are laid end to end in lanes."""

    number: int
    lane: Array
    """[rows]"""
    step: Array
    """[rows]: its position in the lane."""


def _lanes(sizes: Array, beside: bool) -> _Lanes:
    """Lanes of about equal length for episodes of `sizes` rows: one, or with `beside` several in
    parallel, as many as the longest episode allows."""
    total = int(sizes.sum())
    several = power(total // int(sizes.max()) + 1) // 2
    count = several if beside else 1
    starts = np.cumsum(sizes) - sizes
    lane = starts * count // total
    begins = starts[np.searchsorted(lane, lane)]
    return _Lanes(count, np.repeat(lane, sizes), np.arange(total) - np.repeat(begins, sizes))


class _Seen(NamedTuple):
    """The inputs of one row."""

    timestep: Timestep
    taken: Any
    """The recorded action."""
    row: Any
    """Number of the row in the dataset."""


class _Window(NamedTuple):
    """Some steps of all lanes."""

    grid: _Seen
    """[T, lanes, …]"""
    rows: Array
    """The rows it contains."""
    place: tuple[Array, Array]
    """Position of each of them."""
    begins: bool
    """Whether the lanes start here."""


def _windows(rows: Rows, number: int, sizes: Array, lanes: _Lanes, limit: int) -> Iterator[_Window]:
    """Windows of at most `limit` positions, in order of time, of rows numbered from `number`."""
    first = np.zeros(len(lanes.step), np.bool_)
    first[np.cumsum(sizes) - sizes] = True
    # A timestep holds the reward of the action before it.
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
    """The policy's behavior at [T, lanes], and the carry [lanes, …] after it."""
    initial, choose = algorithm.initial_carry(), _drawn if sampled else _greedy

    def one(carry: Any, seen: _Seen) -> tuple[Any, Followed]:
        first = seen.timestep.first
        carry = jax.tree.map(lambda new, old: jnp.where(first, new, old), initial, carry)
        return choose(algorithm, params, carry, seen)

    # Without memory, rows are independent: no scan over time.
    if not jax.tree.leaves(initial):
        return jax.vmap(jax.vmap(lambda seen: one(initial, seen)[1]))(grid), carry
    lanes = jax.vmap(partial(jax.lax.scan, one), in_axes=(0, 1), out_axes=(0, 1))
    carry, done = lanes(carry, grid)
    return done, carry


def _greedy(algorithm: Algorithm, params: Params, carry: Any, seen: _Seen) -> tuple[Any, Followed]:
    """The greedy action at a row: probability one."""
    action, carry = greedy_for_one(algorithm)(params, carry, seen.timestep)
    same = jnp.all(action == seen.taken)
    return carry, Followed(action[None], jnp.where(same, 0.0, -jnp.inf))  # type: ignore[arg-type]


def _drawn(algorithm: Algorithm, params: Params, carry: Any, seen: _Seen) -> tuple[Any, Followed]:
    """Several actions sampled at a row, as in training."""
    log_prob = algorithm.log_prob(params, carry, seen.timestep, seen.taken)
    # Keys depend on the row alone, so draws do not change with the grouping into parts.
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), seen.row), DRAWS)
    one = act_for_one(algorithm)
    act = jax.vmap(lambda key: one(params, carry, seen.timestep, key)[::2])
    actions, carries = act(keys)
    return jax.tree.map(lambda x: x[0], carries), Followed(actions, log_prob)  # type: ignore[arg-type]
