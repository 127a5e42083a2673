"""Estimates of a policy's value from episodes of another policy.

Plain numpy. Every argument holds one array per episode, of that episode's length: a padded table
would be as wide as the longest one. A ratio is π(a|s) / b(a|s), for the target policy π and the
behavior policy b. Precup, Sutton, Singh 2000 (importance sampling),
https://arxiv.org/abs/1511.03722 (doubly robust). Each estimator gives every episode's contribution
to a mean or a weighted mean; `weighted_mean` and `interval` turn them into the estimate.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

Each = Collection[np.ndarray]
"""One array per episode."""

LEAST = 1e-290
"""A mean weight below this counts as zero: dividing a reward by it might overflow."""


class Contributions(NamedTuple):
    """Per-episode contributions to an estimate: the sum of `values` over that of `weights`."""

    values: np.ndarray
    weights: np.ndarray


def weights_so_far(ratios: np.ndarray) -> np.ndarray:
    """ρ_0 ρ_1 … ρ_t at each step t of an episode."""
    return np.cumprod(np.asarray(ratios, np.float64))


def whole_weights(ratios: Each) -> np.ndarray:
    """The product of each episode's ratios."""
    return np.array([weights_so_far(own)[-1] for own in ratios])


def discounts(steps: int, discount: float) -> np.ndarray:
    """1, γ, γ², …"""
    return discount ** np.arange(steps)


def discounted(x: np.ndarray, discount: float) -> float:
    """Σ γ^t x_t over an episode."""
    return float(np.asarray(x, np.float64) @ discounts(len(x), discount))


def ordinary(ratios: Each, rewards: Each, discount: float) -> Contributions:
    """Whole returns weighted by the episode's ratio: unbiased, with high variance."""
    found = weighted(ratios, rewards, discount)
    return found._replace(weights=np.ones(len(found.weights)))


def weighted(ratios: Each, rewards: Each, discount: float) -> Contributions:
    """The same divided by the sum of the weights: slightly biased, with much lower variance."""
    weights = whole_weights(ratios)
    returns = np.array([discounted(own, discount) for own in rewards])
    return Contributions(weights * returns, weights)


def per_decision(ratios: Each, rewards: Each, discount: float) -> Contributions:
    """Each reward weighted by the ratios up to its step: unbiased, with lower variance."""
    lived = zip(ratios, rewards, strict=True)
    values = np.array([discounted(weights_so_far(rho) * r, discount) for rho, r in lived])
    return Contributions(values, np.ones(len(values)))


def weighted_per_decision(ratios: Each, rewards: Each, discount: float) -> Contributions:
    """Each step's rewards divided by the sum of the weights up to it; an episode that has ended
    keeps its final weight. The estimate is a sum of quotients, so episodes contribute through its
    linearization."""
    gamma = discounts(max(map(len, rewards)), discount)
    count, worth, alive, ended = len(ratios), *np.zeros((3, len(gamma) + 1))
    for rho, r in zip(ratios, rewards, strict=True):
        weights, steps = weights_so_far(rho), len(r)
        worth[:steps] += weights * r * gamma[:steps]
        alive[:steps] += weights
        ended[steps] += weights[-1]
    mean = (alive + np.cumsum(ended))[:-1] / count
    # Steps without any weight left contribute nothing.
    inverse = np.divide(1.0, mean, out=np.zeros_like(mean), where=mean > LEAST)
    if not inverse.any():
        return Contributions(np.full(count, np.nan), np.ones(count))
    quotients = worth[:-1] / count * inverse
    behind = np.append(np.cumsum((quotients * inverse)[::-1])[::-1], 0.0)
    values = np.empty(count)
    for i, (rho, r) in enumerate(zip(ratios, rewards, strict=True)):
        weights, steps = weights_so_far(rho), len(r)
        own = weights * (r * gamma[:steps] - quotients[:steps]) * inverse[:steps]
        values[i] = own.sum() - weights[-1] * behind[steps]
    return Contributions(quotients.sum() + values, np.ones(count))


def doubly_robust(
    ratios: Each, rewards: Each, action_values: Each, values: Each, discount: float
) -> Contributions:
    """v(s_0) + Σ γ^t ρ_0…ρ_t (r_t + γ v(s_t+1) - q(s_t, a_t)): correct if the ratios are, or if the
    values are.

    `action_values` are q(s_t, a_t); `values` are v(s_t) under the target policy, one more than
    there are steps, 0 where an episode has terminated.
    """
    found: list[float] = []
    for rho, r, q, v in zip(ratios, rewards, action_values, values, strict=True):
        errors = np.asarray(r, np.float64) + discount * v[1:] - q
        found.append(float(v[0]) + discounted(weights_so_far(rho) * errors, discount))
    return Contributions(np.array(found), np.ones(len(found)))


def weighted_mean(contributions: Contributions) -> float:
    """The estimate; NaN if all weights are zero."""
    return float(np.mean(pseudo_values(contributions)))


def pseudo_values(contributions: Contributions) -> np.ndarray:
    """One number per episode, whose mean is the estimate and whose spread is that of the estimate
    to first order: the values themselves for a plain mean, the linearization for a quotient."""
    values, weights = contributions
    mean = weights.mean()
    if not mean > 0:
        return np.full(len(values), np.nan)
    quotient = values.mean() / mean
    return quotient + (values - quotient * weights) / mean


def interval(
    contributions: Contributions, confidence: float = 0.95, seed: int = 0, resamples: int = 1000
) -> tuple[float, float]:
    """Confidence interval of the estimate by the studentized bootstrap over episodes, which
    accounts for the skew of importance weights. It is still too narrow if there are few effective
    episodes."""
    x = pseudo_values(contributions)
    count, mean = len(x), float(np.mean(x))
    error = float(np.std(x, ddof=1)) / count**0.5 if count > 1 else np.nan
    if not error > 0:
        return (mean, mean) if error == 0 else (np.nan, np.nan)
    rng = np.random.default_rng(seed)
    scores = np.empty(resamples)
    for number in range(resamples):
        drawn = x[rng.integers(count, size=count)]
        # A resample of nearly equal values has almost no spread: bound its score.
        spread = max(float(np.std(drawn, ddof=1)) / count**0.5, 1e-3 * error)
        scores[number] = (np.mean(drawn) - mean) / spread
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(scores, [tail, 100.0 - tail])
    return mean - float(high) * error, mean - float(low) * error


def effective_episodes(ratios: Each) -> float:
    """Effective sample size (Σ w)² / Σ w²: on-policy episodes with about as much information."""
    weights = whole_weights(ratios)
    squares = float(np.sum(weights**2))
    return float(np.sum(weights)) ** 2 / squares if squares > 0 else 0.0
