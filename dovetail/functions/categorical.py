"""Distributions of returns over fixed atoms, https://arxiv.org/abs/1707.06887.

`atoms` [k] are evenly spaced values; a distribution is a vector [..., k] of probabilities or
logits.
"""

import jax
import jax.numpy as jnp


def evenly_spaced(low: float, high: float, count: int) -> jax.Array:
    """`count` atoms from `low` to `high`."""
    return jnp.linspace(low, high, count)


def expected(atoms: jax.Array, logits: jax.Array) -> jax.Array:
    """The mean [...] of distributions with logits [..., k]."""
    return jnp.sum(jax.nn.softmax(logits) * atoms, axis=-1)


def project(
    atoms: jax.Array, probabilities: jax.Array, reward: jax.Array, discount: jax.Array
) -> jax.Array:
    """The distribution of reward + discount × return, on the same atoms: [n, k], from rewards and
    discounts [n]. What falls between two atoms is shared by its distance to them; what falls
    beyond the ends counts as the end."""
    spacing = (atoms[-1] - atoms[0]) / (len(atoms) - 1)
    moved = jnp.clip(reward[:, None] + discount[:, None] * atoms, atoms[0], atoms[-1])
    distance = jnp.abs(moved[:, None, :] - atoms[None, :, None]) / spacing
    return jnp.sum(jnp.clip(1.0 - distance, 0.0, 1.0) * probabilities[:, None, :], axis=-1)


def cross_entropy(logits: jax.Array, probabilities: jax.Array) -> jax.Array:
    """-E[log q] [...] of predictions with logits [..., k] under the target's probabilities."""
    return -jnp.sum(probabilities * jax.nn.log_softmax(logits), axis=-1)
