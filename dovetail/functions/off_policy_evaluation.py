"""What a policy is worth, from episodes that another policy lived through.

Plain numpy; arrays are [episodes, steps], filled up behind an episode's end with rewards of 0 and
ratios of 1. A ratio is π(a|s) / b(a|s): how much more often the policy π in question takes an
action than the behaviour b that did. Precup, Sutton, Singh 2000 (importance sampling),
https://arxiv.org/abs/1511.03722 (doubly robust). Each function gives one number per episode, or
what a weighted mean of them is made of; `weighted_mean` and `interval` finish it.
"""

from typing import NamedTuple

import numpy as np


class Contributions(NamedTuple):
    """What each episode gives to an estimate, the sum of `values` over the sum of `weights`; with
    several columns [episodes, n] the sum of these quotients."""

    values: np.ndarray
    weights: np.ndarray


def weights_so_far(ratios: np.ndarray) -> np.ndarray:
    """ρ_0 ρ_1 … ρ_t at each step t."""
    return np.cumprod(np.asarray(ratios, np.float64), axis=1)


def discounts(steps: int, discount: float) -> np.ndarray:
    """1, γ, γ², …"""
    return discount ** np.arange(steps)


def ordinary(ratios: np.ndarray, rewards: np.ndarray, discount: float) -> Contributions:
    """Whole returns, weighted by the whole episode's ratio: unbiased, and of large variance."""
    weights = weights_so_far(ratios)[:, -1]
    returns = np.asarray(rewards, np.float64) @ discounts(rewards.shape[1], discount)
    return Contributions(weights * returns, np.ones(len(returns)))


def weighted(ratios: np.ndarray, rewards: np.ndarray, discount: float) -> Contributions:
    """The same over the sum of the weights: biased a little, and of much less variance."""
    weights = weights_so_far(ratios)[:, -1]
    returns = np.asarray(rewards, np.float64) @ discounts(rewards.shape[1], discount)
    return Contributions(weights * returns, weights)


def per_decision(ratios: np.ndarray, rewards: np.ndarray, discount: float) -> Contributions:
    """Each reward weighted by the ratios up to it only: unbiased, and better than whole returns."""
    worth = weights_so_far(ratios) * np.asarray(rewards, np.float64)
    return Contributions(worth @ discounts(rewards.shape[1], discount), np.ones(len(worth)))


def weighted_per_decision(
    ratios: np.ndarray, rewards: np.ndarray, discount: float
) -> Contributions:
    """Each step's rewards over the sum of the weights up to it."""
    weights = weights_so_far(ratios)
    worth = weights * np.asarray(rewards, np.float64) * discounts(rewards.shape[1], discount)
    return Contributions(worth, weights)


def doubly_robust(
    ratios: np.ndarray,
    rewards: np.ndarray,
    action_values: np.ndarray,
    values: np.ndarray,
    discount: float,
) -> Contributions:
    """v(s_0) + Σ γ^t ρ_0…ρ_t (r_t + γ v(s_t+1) - q(s_t, a_t)): right if the ratios are, or if the
    values are.

    `action_values` are q(s_t, a_t) [E, T], 0 behind an episode's end; `values` are v(s_t)
    [E, T + 1] of the policy in question, 0 where an episode has terminated and behind.
    """
    weights = weights_so_far(ratios)
    errors = np.asarray(rewards, np.float64) + discount * values[:, 1:] - action_values
    corrections = (weights * errors) @ discounts(rewards.shape[1], discount)
    return Contributions(values[:, 0] + corrections, np.ones(len(corrections)))


def weighted_mean(contributions: Contributions) -> float:
    """The estimate; NaN if no weight is left."""
    return float(np.mean(pseudo_values(contributions)))


def pseudo_values(contributions: Contributions) -> np.ndarray:
    """One number per episode, whose mean is the estimate and whose spread is that of the estimate
    to first order: for a plain mean the values themselves, for a quotient its linearisation."""
    values, weights = (np.reshape(x, (len(x), -1)) for x in contributions)
    mean = weights.mean(axis=0)
    some = mean > 0
    if not some.any():
        return np.full(len(values), np.nan)
    quotients = values[:, some].mean(axis=0) / mean[some]
    influence = (values[:, some] - quotients * weights[:, some]) / mean[some]
    return quotients.sum() + influence.sum(axis=1)


def interval(
    contributions: Contributions, confidence: float = 0.95, seed: int = 0, resamples: int = 1000
) -> tuple[float, float]:
    """The estimate's interval: the studentised bootstrap over episodes, which allows for the skew
    of importance weights. Too narrow still if the effective episodes are few."""
    x = pseudo_values(contributions)
    count, mean = len(x), float(np.mean(x))
    error = float(np.std(x, ddof=1)) / count**0.5 if count > 1 else np.nan
    if not error > 0:
        return (mean, mean) if error == 0 else (np.nan, np.nan)
    rng = np.random.default_rng(seed)
    scores = np.empty(resamples)
    for number in range(resamples):
        drawn = x[rng.integers(count, size=count)]
        spread = max(float(np.std(drawn, ddof=1)) / count**0.5, 1e-3 * error)
        scores[number] = (np.mean(drawn) - mean) / spread
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(scores, [tail, 100.0 - tail])
    return mean - float(high) * error, mean - float(low) * error


def effective_episodes(ratios: np.ndarray) -> float:
    """(Σ w)² / Σ w²: as many episodes of the policy itself would tell about as much."""
    weights = weights_so_far(ratios)[:, -1]
    squares = float(np.sum(weights**2))
    return float(np.sum(weights)) ** 2 / squares if squares > 0 else 0.0
