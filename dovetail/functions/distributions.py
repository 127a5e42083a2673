"""Distributions over actions: small pytrees of network outputs.

The last axis is the event axis (the logits, the action's entries); any axes before it are batch
axes. `from_network` picks the distribution that suits an action space.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.scipy.special import log_ndtr

from dovetail.envs.interface import ActionSpace, Continuous, Discrete

BELOW_ONE = 1 - 2**-24
"""The largest float32 below 1."""


class Categorical(NamedTuple):
    """One choice of n. To mask a choice give it a large negative logit, not minus infinity."""

    logits: jax.Array
    """[..., n], unnormalized."""

    def sample(self, key: jax.Array) -> jax.Array:
        """int32[...], by inverting the cumulative distribution: one random number per sample."""
        weights = jnp.exp(self.logits - self.logits.max(axis=-1, keepdims=True))
        cumulative = jnp.cumsum(weights, axis=-1)
        # Scaled by the rounded total, the point stays below it: the last choice with any
        # weight can be drawn, and none of weight zero can.
        point = jax.random.uniform(key, cumulative.shape[:-1]) * cumulative[..., -1]
        return jnp.sum(cumulative[..., :-1] <= point[..., None], axis=-1, dtype=jnp.int32)

    def mode(self) -> jax.Array:
        """int32[...], the most likely choice."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def log_prob(self, x: jax.Array) -> jax.Array:
        """Log-probability [...] of choices x, integers [...]."""
        log_probs = jax.nn.log_softmax(self.logits)
        return jnp.take_along_axis(log_probs, x[..., None], axis=-1)[..., 0]

    def entropy(self) -> jax.Array:
        """[...], in nats."""
        log_probs = jax.nn.log_softmax(self.logits)
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    def kl(self, other: Self) -> jax.Array:
        """KL(self || other), [...]."""
        log_probs = jax.nn.log_softmax(self.logits)
        difference = log_probs - jax.nn.log_softmax(other.logits)
        return jnp.sum(jnp.exp(log_probs) * difference, axis=-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MultiCategorical:
    """Several independent choices, choice i of nvec[i]."""

    logits: jax.Array
    """[..., sum(nvec)]: the logits of all choices, concatenated."""
    nvec: tuple[int, ...] = field(metadata={"static": True})

    def sample(self, key: jax.Array) -> jax.Array:
        """int32[..., len(nvec)]."""
        keys = jax.random.split(key, len(self.nvec))
        choices = [one.sample(k) for one, k in zip(self._each(), keys, strict=True)]
        return jnp.stack(choices, axis=-1)

    def mode(self) -> jax.Array:
        """int32[..., len(nvec)]."""
        return jnp.stack([one.mode() for one in self._each()], axis=-1)

    def log_prob(self, x: jax.Array) -> jax.Array:
        """Log-probability [...] of x, integers [..., len(nvec)]."""
        return self._sum(lambda i, one: one.log_prob(x[..., i]))

    def entropy(self) -> jax.Array:
        """[...], in nats."""
        return self._sum(lambda _, one: one.entropy())

    def kl(self, other: Self) -> jax.Array:
        """KL(self || other), [...]."""
        others = other._each()
        return self._sum(lambda i, one: one.kl(others[i]))

    def _each(self) -> list[Categorical]:
        ends = [sum(self.nvec[: i + 1]) for i in range(len(self.nvec))]
        return [
            Categorical(self.logits[..., end - n : end])
            for n, end in zip(self.nvec, ends, strict=True)
        ]

    def _sum(self, term: Callable[[int, Categorical], jax.Array]) -> jax.Array:
        return jnp.sum(jnp.stack([term(i, one) for i, one in enumerate(self._each())]), axis=0)


class Gaussian(NamedTuple):
    """Independent normal entries (diagonal covariance)."""

    mean: jax.Array
    """[..., size]"""
    log_std: jax.Array
    """[..., size], or [size] shared by the batch."""

    def sample(self, key: jax.Array) -> jax.Array:
        """float32[..., size], differentiable in mean and log_std."""
        noise = jax.random.normal(key, self.mean.shape, self.mean.dtype)
        return self.mean + jnp.exp(self.log_std) * noise

    def mode(self) -> jax.Array:
        """The mean."""
        return self.mean

    def log_prob(self, x: jax.Array) -> jax.Array:
        """Log-density [...] of x, [..., size]."""
        z = (x - self.mean) * jnp.exp(-self.log_std)
        return jnp.sum(-0.5 * z * z - self.log_std - 0.5 * math.log(2 * math.pi), axis=-1)

    def clipped_log_prob(self, x: jax.Array) -> jax.Array:
        """Log-probability [...] of samples clipped to [-1, 1]: at a bound, the log of the tail mass
        beyond it; elsewhere the log-density."""
        z = (x - self.mean) * jnp.exp(-self.log_std)
        density = -0.5 * z * z - self.log_std - 0.5 * math.log(2 * math.pi)
        # log_ndtr stays finite far in the tail, where log(1 - cdf) would be -inf.
        beyond = log_ndtr((jnp.sign(x) * self.mean - 1.0) * jnp.exp(-self.log_std))
        return jnp.sum(jnp.where(jnp.abs(x) == 1, beyond, density), axis=-1)

    def entropy(self) -> jax.Array:
        """[...], in nats."""
        log_std = jnp.broadcast_to(self.log_std, self.mean.shape)
        return jnp.sum(log_std + 0.5 * math.log(2 * math.pi * math.e), axis=-1)

    def kl(self, other: Self) -> jax.Array:
        """KL(self || other), [...]."""
        log_ratio = other.log_std - self.log_std
        z = (self.mean - other.mean) * jnp.exp(-other.log_std)
        return jnp.sum(log_ratio + 0.5 * (jnp.exp(-2 * log_ratio) + z * z - 1.0), axis=-1)


class SquashedGaussian(NamedTuple):
    """Independent normal entries, each squashed into (-1, 1) by tanh:
    https://arxiv.org/abs/1812.05905, appendix C."""

    mean: jax.Array
    """[..., size], before squashing."""
    log_std: jax.Array
    """[..., size]"""

    def sample(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(float32[..., size], its log-density [...]), differentiable in mean and log_std.

        The density is computed with the sample: recovered from the squashed sample alone, it would
        be inaccurate near the bounds.
        """
        noise = jax.random.normal(key, self.mean.shape, self.mean.dtype)
        noise = jax.lax.optimization_barrier(noise)  # XLA would redraw it at each use
        x = self.mean + jnp.exp(self.log_std) * noise
        normal = -0.5 * noise * noise - self.log_std - 0.5 * math.log(2 * math.pi)
        # log(1 - tanh(x)²), in a form that does not underflow for large |x|.
        log_slope = 2.0 * (math.log(2) - x - jax.nn.softplus(-2.0 * x))
        return jnp.tanh(x), jnp.sum(normal - log_slope, axis=-1)

    def mode(self) -> jax.Array:
        """The squashed mean."""
        return jnp.tanh(self.mean)

    def log_prob(self, x: jax.Array) -> jax.Array:
        """Log-density [...] of x, [..., size]: at a bound, that of the nearest float inside it;
        outside the bounds, minus infinity."""
        within = jnp.arctanh(jnp.clip(x, -BELOW_ONE, BELOW_ONE))
        z = (within - self.mean) * jnp.exp(-self.log_std)
        normal = -0.5 * z * z - self.log_std - 0.5 * math.log(2 * math.pi)
        log_slope = 2.0 * (math.log(2) - within - jax.nn.softplus(-2.0 * within))
        found = jnp.where(jnp.abs(x) > 1, -jnp.inf, normal - log_slope)
        return jnp.sum(found, axis=-1)


Distribution = Categorical | MultiCategorical | Gaussian


def output_size(action: ActionSpace) -> int:
    """Number of network outputs that parameterize the distribution over `action`."""
    match action:
        case Discrete():
            return action.n
        case Continuous():
            return action.size
        case _:
            return sum(action.nvec)


def from_network(
    action: ActionSpace, outputs: jax.Array, log_std: jax.Array | float = 0.0
) -> Distribution:
    """The distribution over `action` given by network outputs [..., output_size(action)].

    For continuous actions the outputs are the mean, and `log_std` the log standard deviation.
    """
    match action:
        case Discrete():
            return Categorical(outputs)
        case Continuous():
            return Gaussian(outputs, jnp.broadcast_to(jnp.asarray(log_std), outputs.shape))
        case _:
            return MultiCategorical(outputs, action.nvec)
