"""Running mean and variance of observations or rewards, independent of how a batch is split.

Copies exchange a batch as `Sums` of its deviations from the running mean. Sums may be averaged over
copies (`rl.mean`): only their ratios matter, so the result is exactly that of the whole batch, even
with steps excluded by zero weight. `update` then applies Chan's parallel formula,
https://doi.org/10.1080/00031305.1983.10483115. Image leaves (uint8) are left unchanged.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Moments(NamedTuple):
    """Mean and variance of the data so far; entries of images are empty."""

    weight: jax.Array
    """Sum of the weights so far; starts at 0."""
    mean: Any
    variance: Any


class Sums(NamedTuple):
    """A batch's weighted sums of deviations from a running mean, and of their squares."""

    weight: jax.Array
    first: Any
    second: Any


def initial_moments(example: Any) -> Moments:
    """Moments of no data (mean 0, variance 1) for leaves shaped like `example`, arrays or specs."""

    def filled(value: float) -> Any:
        return jax.tree.map(
            lambda x: jnp.full((0,) if _is_image(x) else x.shape, value, jnp.float32), example
        )

    return Moments(jnp.zeros(()), filled(0.0), filled(1.0))


def batch_sums(moments: Moments, x: Any, weights: jax.Array) -> Sums:
    """The sums of a batch x, a pytree of [*weights.shape, ...], around the running mean."""

    def powers(leaf: jax.Array, mean: jax.Array) -> tuple[jax.Array, jax.Array]:
        if _is_image(leaf):
            # Images have no statistics: their entries are empty arrays.
            return mean, mean
        axes = tuple(range(weights.ndim))
        w = jnp.expand_dims(weights, tuple(range(weights.ndim, leaf.ndim)))
        deviation = leaf.astype(jnp.float32) - mean
        return jnp.sum(w * deviation, axes), jnp.sum(w * jnp.square(deviation), axes)

    pairs = jax.tree.map(powers, x, moments.mean)
    first, second = jax.tree.transpose(jax.tree.structure(x), jax.tree.structure((0, 0)), pairs)
    return Sums(jnp.sum(weights.astype(jnp.float32)), first, second)


def around(mean: Any, sums: Sums) -> Sums:
    """Converts sums of deviations from 0 into sums of deviations from `mean`."""
    weight = sums.weight
    first = jax.tree.map(lambda first, m: first - weight * m, sums.first, mean)
    second = jax.tree.map(
        lambda second, first, m: second - 2.0 * m * first + weight * jnp.square(m),
        sums.second,
        sums.first,
        mean,
    )
    return Sums(weight, first, second)


def update(moments: Moments, sums: Sums) -> Moments:
    """Moments of all earlier data and the batch together."""
    weight = moments.weight + sums.weight
    total = jnp.where(weight > 0, weight, 1.0)
    # The sums are deviations from the old mean, so this is how far the mean moves.
    shift = jax.tree.map(lambda first: first / total, sums.first)

    def pooled(variance: jax.Array, second: jax.Array, shift: jax.Array) -> jax.Array:
        both = (moments.weight * variance + second) / total - jnp.square(shift)
        # Rounding can make a tiny variance negative.
        return jnp.where(weight > 0, jnp.maximum(both, 0.0), variance)

    mean = jax.tree.map(jnp.add, moments.mean, shift)
    return Moments(weight, mean, jax.tree.map(pooled, moments.variance, sums.second, shift))


def normalize(moments: Moments, x: Any, clip: float = 10.0) -> Any:
    """(x - mean) / standard deviation, clipped to [-clip, clip]; images unchanged."""

    def one(leaf: jax.Array, mean: jax.Array, variance: jax.Array) -> jax.Array:
        if _is_image(leaf):
            return leaf
        return jnp.clip((leaf - mean) * jax.lax.rsqrt(variance + 1e-8), -clip, clip)

    return jax.tree.map(one, x, moments.mean, moments.variance)


def scale(moments: Moments, x: jax.Array, clip: float = 10.0) -> jax.Array:
    """x / standard deviation, clipped but not centered: for rewards, whose sign matters."""
    return jnp.clip(x * jax.lax.rsqrt(moments.variance + 1e-8), -clip, clip)


def _is_image(leaf: Any) -> bool:
    return leaf.dtype == jnp.uint8
