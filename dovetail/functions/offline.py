"""Loss terms for learning from recorded actions, without querying values of untried actions.

An expectile instead of a maximum, weights that favor the better recorded actions, and a penalty on
the values of all others.
"""

import jax
import jax.numpy as jnp


def expectile_loss(errors: jax.Array, expectile: float) -> jax.Array:
    """|τ - 1(u < 0)| u² of each error u, https://arxiv.org/abs/2110.06169 (equation 5).

    With errors `target - value`, the minimizer is the mean of the targets for τ = 0.5, and
    approaches their maximum as τ → 1.
    """
    return jnp.where(errors < 0, 1.0 - expectile, expectile) * jnp.square(errors)


def advantage_weights(advantages: jax.Array, inverse_temperature: float, limit: float) -> jax.Array:
    """exp(β A), clipped to `limit`; no gradient. https://arxiv.org/abs/1910.00177."""
    weights = jnp.exp(inverse_temperature * jax.lax.stop_gradient(advantages))
    return jnp.minimum(weights, limit)


def conservative_gap(
    values: jax.Array, taken: jax.Array, log_densities: jax.Array | float = 0.0
) -> jax.Array:
    """The soft maximum over all action values minus the recorded actions' values,
    https://arxiv.org/abs/2006.04779 (equation 4).

    `values` [..., choices] are those of every action, `taken` [...] those of the recorded ones. For
    sampled actions, `log_densities` are their log-densities under the sampling distribution plus
    the log of their number.
    """
    return jax.nn.logsumexp(values - log_densities, axis=-1) - taken
