"""Transitions as actors insert them into a replay, and as a gradient step learns from them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.algorithm import RL, Trajectory
from dovetail.envs.interface import Continuous, EnvSpec
from dovetail.functions.bootstrapping import n_step, row
from dovetail.replay.replay import Replay
from dovetail.replay.sample import Sample

LEAST_PRIORITY = 1e-6
"""Added to every error, so that a transition without error can still be sampled."""


class Row(NamedTuple):
    """One step as the replay keeps it."""

    observation: Any
    action: Any
    reward: Any
    terminated: Any


class Batch(NamedTuple):
    """Transitions of a gradient step, [n, …]."""

    observation: Any
    action: jax.Array
    reward: jax.Array
    """Discounted sum of the rewards up to `following`."""
    discount: jax.Array
    """Factor of the value of `following`: γⁿ, or 0 where the episode terminated."""
    following: Any
    """Observation n steps later."""
    weights: jax.Array
    """Weight of each transition in the loss."""
    goal: jax.Array | tuple[()] = ()
    """The critics' target, where it is computed before the gradient step."""


def example_row(env: EnvSpec) -> Row:
    """Shapes and dtypes of a row."""
    continuous = isinstance(env.action, Continuous)
    shape = (env.action.size,) if isinstance(env.action, Continuous) else ()
    return Row(
        observation=env.observation,
        action=jax.ShapeDtypeStruct(shape, jnp.float32 if continuous else jnp.int32),
        reward=jax.ShapeDtypeStruct((), jnp.float32),
        terminated=jax.ShapeDtypeStruct((), jnp.bool_),
    )


def rows_of(steps: Trajectory) -> tuple[Row, Row]:
    """(rows, final rows) of a trajectory, as `rl.insert` takes them."""
    rows = Row(steps.observation, steps.action, steps.reward, steps.terminated)
    return rows, Row(steps.next_observation, None, None, None)


def transitions(sample: Sample, discount: float) -> Batch:
    """n-step transitions [n, …] of sampled windows of rows [n, W, …]."""
    rows, mask = sample.rows, jnp.asarray(sample.mask)
    steps = n_step(rows.reward, rows.terminated, mask, discount)
    weights = mask[:, 0].astype(jnp.float32)  # a window that was broken off has no step
    return Batch(
        observation=jax.tree.map(lambda x: x[:, 0], rows.observation),
        action=rows.action[:, 0],
        reward=steps.reward,
        discount=steps.discount,
        following=row(rows.observation, steps.last),
        weights=weights,
    )


def joined(batches: list[Batch]) -> Batch:
    """The transitions of several batches [K, n, …] along n."""
    if len(batches) == 1:
        return batches[0]
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *batches)


def update_priorities(
    rl: RL, replay: Replay | tuple[()], replayed: Sample | None, errors: jax.Array
) -> Replay | tuple[()]:
    """The replay with priorities by errors [K, n], of which the first along n are its own; as it
    is if nothing was replayed."""
    if replayed is None or not isinstance(replay, Replay):
        return replay
    own = errors[:, : replayed.keys.slot.shape[1]]
    return rl.update_priorities(replay, replayed.keys, own + LEAST_PRIORITY)
