"""Terms of policy-gradient and value losses: scalars, averaged over all entries with `weights`.

Weights have mean one: `loss_weights(valid)` excludes the steps in which a back end only reset
itself. Also averaged over learner copies (`average=rl.mean`), they make the mean of the copies'
losses equal the loss of the whole batch, however its invalid steps are distributed.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def loss_weights(
    valid: jax.Array, average: Callable[[jax.Array], jax.Array] = lambda x: x
) -> jax.Array:
    """Weights of mean one that are zero where not valid; all zero if nothing is valid."""
    weights = valid.astype(jnp.float32)
    # Averaged before the division, so that copies divide by the same number.
    share = average(jnp.mean(weights))
    return weights / jnp.where(share > 0, share, 1.0)


def weighted_mean(x: jax.Array, weights: jax.Array) -> jax.Array:
    """The mean of x under weights of mean one."""
    return jnp.mean(x * weights)


def standardize(
    x: jax.Array, weights: jax.Array, average: Callable[[jax.Array], jax.Array] = lambda x: x
) -> jax.Array:
    """x with weighted mean 0 and standard deviation 1, as PPO does to advantages."""
    centred = x - average(weighted_mean(x, weights))
    variance = average(weighted_mean(jnp.square(centred), weights))
    # Equal advantages have no variance: they become 0, not NaN.
    return centred * jax.lax.rsqrt(variance + 1e-8)


def policy_gradient(log_probs: jax.Array, advantages: jax.Array, weights: jax.Array) -> jax.Array:
    """-E[log π(a|s) A], https://doi.org/10.1007/BF00992696; advantages get no gradient."""
    return -weighted_mean(log_probs * jax.lax.stop_gradient(advantages), weights)


def clipped_surrogate(
    log_probs: jax.Array,
    behavior_log_probs: jax.Array,
    advantages: jax.Array,
    clip: float,
    weights: jax.Array,
) -> jax.Array:
    """PPO's policy loss, https://arxiv.org/abs/1707.06347 (equation 7, negated)."""
    ratio = jnp.exp(log_probs - behavior_log_probs)
    clipped = jnp.clip(ratio, 1.0 - clip, 1.0 + clip)
    # The smaller of the two: there is nothing to gain from moving the ratio out of the interval.
    return -weighted_mean(jnp.minimum(ratio * advantages, clipped * advantages), weights)


def clip_fraction(
    log_probs: jax.Array, behavior_log_probs: jax.Array, clip: float, weights: jax.Array
) -> jax.Array:
    """Fraction of entries whose probability ratio left [1 - clip, 1 + clip]."""
    ratio = jnp.exp(log_probs - behavior_log_probs)
    return weighted_mean((jnp.abs(ratio - 1.0) > clip).astype(jnp.float32), weights)


def value_loss(values: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """Half the mean squared error; targets get no gradient."""
    return 0.5 * weighted_mean(jnp.square(values - jax.lax.stop_gradient(targets)), weights)


def clipped_value_loss(
    values: jax.Array,
    behavior_values: jax.Array,
    targets: jax.Array,
    clip: float,
    weights: jax.Array,
) -> jax.Array:
    """Half the mean squared error, taking the larger error of v and of v clipped to its old value ±
    clip.

    Not in PPO's paper but in its code, as noted in https://arxiv.org/abs/2005.12729 (section 3).
    """
    targets = jax.lax.stop_gradient(targets)
    near = behavior_values + jnp.clip(values - behavior_values, -clip, clip)
    worse = jnp.maximum(jnp.square(values - targets), jnp.square(near - targets))
    return 0.5 * weighted_mean(worse, weights)


def entropy_loss(entropies: jax.Array, weights: jax.Array) -> jax.Array:
    """Minus the mean entropy; with a small coefficient it keeps the policy exploring.

    https://arxiv.org/abs/1602.01783 (section 4).
    """
    return -weighted_mean(entropies, weights)


def approximate_kl(
    log_probs: jax.Array, behavior_log_probs: jax.Array, weights: jax.Array
) -> jax.Array:
    """KL(behavior || policy) from actions of the behavior policy,
    http://joschu.net/blog/kl-approx.html.

    The estimator (ρ - 1) - log ρ is unbiased and never negative.
    """
    log_ratio = log_probs - behavior_log_probs
    # expm1 keeps the digits where the ratio is near one.
    return weighted_mean(jnp.expm1(log_ratio) - log_ratio, weights)


def explained_variance(values: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """1 - Var[targets - values] / Var[targets]: 1 is perfect, 0 no better than a constant."""
    unexplained = _variance(targets - values, weights)
    total = _variance(targets, weights)
    # Constant targets would be 0 / 0.
    return jnp.where(total > 0, 1.0 - unexplained / jnp.where(total > 0, total, 1.0), 0.0)


def _variance(x: jax.Array, weights: jax.Array) -> jax.Array:
    return weighted_mean(jnp.square(x - weighted_mean(x, weights)), weights)
