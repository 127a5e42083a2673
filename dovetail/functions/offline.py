"""Terms of losses that learn from recorded actions, without asking for actions nobody tried.

An expectile instead of a maximum, weights that prefer the better of the recorded actions, and a
penalty on the values of all the others.
"""

import jax
import jax.numpy as jnp


def expectile_loss(errors: jax.Array, expectile: float) -> jax.Array:
    """|τ - 1(u < 0)| u² of each error u, https://arxiv.org/abs/2110.06169 (equation 5).

    With errors `target - value` and τ = 0.5 the best value is the targets' mean, with τ near 1
    their maximum.
    """
    return jnp.where(errors < 0, 1.0 - expectile, expectile) * jnp.square(errors)


def advantage_weights(advantages: jax.Array, inverse_temperature: float, limit: float) -> jax.Array:
    """exp(β A), at most `limit`; no gradient. https://arxiv.org/abs/1910.00177."""
    weights = jnp.exp(inverse_temperature * jax.lax.stop_gradient(advantages))
    return jnp.minimum(weights, limit)


def conservative_gap(
    values: jax.Array, taken: jax.Array, log_densities: jax.Array | float = 0.0
) -> jax.Array:
    """How far the soft maximum of all values is above the values of what was recorded,
    https://arxiv.org/abs/2006.04779 (equation 4).

    `values` [..., choices] are those of every action, `taken` [...] of the recorded ones. Where the
    actions are a sample, `log_densities` are those by which they were drawn, less the logarithm of
    their number.
    """
    return jax.nn.logsumexp(values - log_densities, axis=-1) - taken
