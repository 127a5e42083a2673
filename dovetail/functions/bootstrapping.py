"""Targets for action values from windows of replayed steps, batch first [n, W].

A window holds up to W - 1 steps, followed by the row of their successor. `mask` marks the rows that
are steps.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class NStep(NamedTuple):
    """An n-step target without its bootstrap value."""

    reward: jax.Array
    """Discounted sum of rewards [n]."""
    discount: jax.Array
    """Discount of the bootstrap value [n]: 0 where the episode terminated."""
    last: jax.Array
    """Index of the successor's row, whose value bootstraps the target [n]."""


def n_step(rewards: jax.Array, terminated: jax.Array, mask: jax.Array, discount: float) -> NStep:
    """Discounted rewards of each window and the discount of its bootstrap value: [n, W] → [n]."""
    powers = discount ** jnp.arange(rewards.shape[1])
    # Steps come first in a window, so their number is the successor's index.
    last = mask.sum(axis=1)
    ended = jnp.any(terminated & mask, axis=1)
    return NStep(
        reward=jnp.sum(jnp.where(mask, rewards, 0.0) * powers, axis=1),
        discount=jnp.where(ended, 0.0, discount**last),
        last=last,
    )


def chosen(outputs: jax.Array, action: jax.Array) -> jax.Array:
    """The outputs [..., K] of the chosen actions [...], from outputs [..., actions, K]."""
    return jnp.take_along_axis(outputs, action[..., None, None], axis=-2)[..., 0, :]


def row(tree: Any, index: jax.Array) -> Any:
    """Row index[i] of window i, from rows [n, W, …]."""
    return jax.tree.map(lambda x: jax.vmap(lambda rows, i: rows[i])(x, index), tree)
