"""Normalization of observations and rewards by running moments."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.algorithm import RL
from dovetail.functions.normalization import Moments, batch_sums, normalize, scale, update
from dovetail.trajectory import Trajectory


class NormalizedBatch(NamedTuple):
    """A batch's observations and rewards [T, B, …], and the moments that now include them."""

    observation: Any
    reward: jax.Array
    moments: Moments
    return_moments: Moments


def normalized(observation: Any, moments: Moments, enabled: bool) -> Any:
    """The observation, shifted and scaled by its moments if normalization is enabled."""
    return normalize(moments, observation) if enabled else observation


def discounted_return(so_far: Any, reward: jax.Array, discount: float) -> Any:
    """γ G + r, the episode's return with one more reward; empty if `so_far` is empty."""
    return jax.tree.map(lambda returned: discount * returned + reward, so_far)


def normalized_batch(
    rl: RL,
    batch: Trajectory,
    moments: Moments,
    return_moments: Moments,
    gamma: float,
    *,
    observations: bool,
    rewards: bool,
) -> NormalizedBatch:
    """Adds a batch to the moments, and normalizes its observations and rewards as enabled.

    Rewards are scaled by moments that include the batch. Observations are normalized by the moments
    before it, which the actors had: log-probabilities of both sides then compare.
    """
    before, reward = moments, batch.reward
    valid = batch.valid.astype(jnp.float32)
    if rewards:
        returns = gamma * batch.extras.discounted_return + reward
        sums = batch_sums(return_moments, returns, valid)
        return_moments = update(return_moments, rl.mean(sums))
        reward = scale(return_moments, reward)
    if observations:
        moments = update(moments, rl.mean(batch_sums(moments, batch.observation, valid)))
    observation = normalized(batch.observation, before, observations)
    return NormalizedBatch(observation, reward, moments, return_moments)
