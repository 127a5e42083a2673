"""Return distributions instead of means: on fixed atoms (categorical) or as quantiles.

Atoms are fixed values with a probability each; quantiles are values of equal probability. The last
axis is that of the atoms or quantiles.
"""

import jax
import jax.numpy as jnp


def atoms(low: float, high: float, count: int) -> jax.Array:
    """The support of a categorical distribution [count], evenly spaced."""
    return jnp.linspace(low, high, count)


def expected(logits: jax.Array, support: jax.Array) -> jax.Array:
    """The means [...] of distributions with logits [..., A] on `support` [A]."""
    return jax.nn.softmax(logits) @ support


def project(values: jax.Array, probabilities: jax.Array, support: jax.Array) -> jax.Array:
    """Projects probabilities [..., K] at `values` [..., K] onto the evenly spaced `support` [A]:
    each is split between its two neighbors by linear interpolation,
    https://arxiv.org/abs/1707.06887 (equation 7).

    Values outside the support are clipped to its ends.
    """
    step = support[1] - support[0]
    places = jnp.clip(values, support[0], support[-1])
    # Triangular kernel: 1 at an atom, 0 at its neighbors.
    distance = jnp.abs(places[..., None, :] - support[:, None]) / step
    return jnp.sum(jnp.clip(1.0 - distance, 0.0, 1.0) * probabilities[..., None, :], axis=-1)


def cross_entropy(logits: jax.Array, probabilities: jax.Array) -> jax.Array:
    """-Σ p log q over the last axis, where q is the softmax of `logits`."""
    return -jnp.sum(probabilities * jax.nn.log_softmax(logits), axis=-1)


def divergence(logits: jax.Array, probabilities: jax.Array) -> jax.Array:
    """KL divergence Σ p log(p / q) over the last axis, where q is the softmax of `logits`.

    It is the cross-entropy minus the entropy of p, which remains even when q fits perfectly.
    """
    return cross_entropy(logits, probabilities) + jnp.sum(
        jax.scipy.special.xlogy(probabilities, probabilities), axis=-1
    )


def categorical_td(
    logits: jax.Array,
    reward: jax.Array,
    discount: jax.Array,
    following: jax.Array,
    support: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(losses, errors) [n] of distributions with `logits` [n, A] on `support` [A]; the target is
    the distribution with logits `following` [n, A], scaled by `discount` [n] and shifted by
    `reward` [n].

    The loss is the cross-entropy, https://arxiv.org/abs/1707.06887 (algorithm 1). The error is the
    KL divergence: the cross-entropy would also be large where the target is merely uncertain.
    """
    moved = reward[:, None] + discount[:, None] * support
    target = project(moved, jax.nn.softmax(following), support)
    errors = divergence(jax.lax.stop_gradient(logits), target)
    return cross_entropy(logits, target), jnp.maximum(errors, 0.0)  # negative only by rounding


def quantile_huber_loss(
    quantiles: jax.Array, targets: jax.Array, threshold: float = 1.0
) -> jax.Array:
    """Quantile regression of `quantiles` [..., Q] on samples `targets` [..., K], with errors up to
    `threshold` squared, https://arxiv.org/abs/1710.10044 (equation 10): [...].

    Summed over quantiles, averaged over targets.
    """
    count = quantiles.shape[-1]
    middles = (jnp.arange(count) + 0.5) / count
    errors = targets[..., None, :] - quantiles[..., :, None]
    size = jnp.abs(errors)
    square = 0.5 * jnp.square(jnp.minimum(size, threshold))
    huber = square + threshold * jnp.maximum(size - threshold, 0.0)
    # τ for targets above the quantile, 1 - τ for those below it.
    weights = jnp.abs(middles[:, None] - (errors < 0))
    return jnp.sum(jnp.mean(weights * huber / threshold, axis=-1), axis=-1)
