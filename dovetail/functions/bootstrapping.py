"""Targets of action values from windows of replayed steps, batch first [n, W].

A window is up to W - 1 steps and, behind the last, the row that shows where they led. `mask` says
which rows are steps.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class NStep(NamedTuple):
    """What is known of some steps without a value."""

    reward: jax.Array
    """The discounted sum of the rewards [n]."""
    discount: jax.Array
    """How much the value of where they led counts [n]: 0 where the episode terminated."""
    last: jax.Array
    """The row that shows where they led [n]."""


def n_step(rewards: jax.Array, terminated: jax.Array, mask: jax.Array, discount: float) -> NStep:
    """Rewards along each window, and what its last row counts; all [n, W] → [n]."""
    powers = discount ** jnp.arange(rewards.shape[1])
    last = mask.sum(axis=1)
    ended = jnp.any(terminated & mask, axis=1)
    return NStep(
        reward=jnp.sum(jnp.where(mask, rewards, 0.0) * powers, axis=1),
        discount=jnp.where(ended, 0.0, discount**last),
        last=last,
    )


def chosen(outputs: jax.Array, action: jax.Array) -> jax.Array:
    """Of outputs [..., actions, K] those of an action [...]: [..., K]."""
    return jnp.take_along_axis(outputs, action[..., None, None], axis=-2)[..., 0, :]


def row(tree: Any, index: jax.Array) -> Any:
    """Of rows [n, W, …], row index[i] of window i."""
    return jax.tree.map(lambda x: jax.vmap(lambda rows, i: rows[i])(x, index), tree)
