"""Value rescaling that grows like a square root, so that rewards need no clipping.

h(x) = sign(x) (√(|x| + 1) - 1) + ε x, https://arxiv.org/abs/1805.11593 (section 3.2).
"""

import jax
import jax.numpy as jnp

EPSILON = 1e-3
"""Keeps the inverse of h Lipschitz for large values."""


def rescale(x: jax.Array, epsilon: float = EPSILON) -> jax.Array:
    """h(x)."""
    return jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1.0) - 1.0) + epsilon * x


def restore(x: jax.Array, epsilon: float = EPSILON) -> jax.Array:
    """The inverse of h."""
    root = jnp.sqrt(1.0 + 4.0 * epsilon * (jnp.abs(x) + 1.0 + epsilon))
    # Equals (root - 1) / 2ε, without the cancellation at small ε.
    inner = 2.0 * (jnp.abs(x) + 1.0 + epsilon) / (root + 1.0)
    return jnp.sign(x) * (jnp.square(inner) - 1.0)
