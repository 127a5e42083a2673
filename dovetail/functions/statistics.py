"""Statistics over several seeds, with intervals, after https://arxiv.org/abs/2108.13264.

Plain numpy: the first axis is the seed; any other axes (the points of a curve) are kept.
"""

from collections.abc import Callable

import numpy as np

from dovetail.errors import UserError


def interquartile_mean(x: np.ndarray, axis: int = 0) -> np.ndarray:
    """The mean of the middle half along `axis`: drops a quarter at each end, rounded down."""
    ordered = np.sort(np.asarray(x, dtype=np.float64), axis=axis)
    seeds = ordered.shape[axis]
    left_out = seeds // 4
    return np.take(ordered, np.arange(left_out, seeds - left_out), axis=axis).mean(axis=axis)


def bootstrap_interval(
    x: np.ndarray,
    statistic: Callable[..., np.ndarray] = interquartile_mean,
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = 2000,
) -> tuple[np.ndarray, np.ndarray]:
    """The percentile-bootstrap interval (low, high) of `statistic(x, axis=…)` over seeds.

    x is [seeds] or [seeds, points]. A seed is resampled with its whole curve, so that a curve's
    points stay together.
    """
    x = np.asarray(x, dtype=np.float64)
    if x.ndim == 0 or x.shape[0] == 0:
        raise UserError("bootstrap_interval needs at least one seed, but was given none.")
    if not 0.0 < confidence < 1.0:
        raise UserError(
            f"bootstrap_interval needs a confidence between 0 and 1, but was given {confidence}."
        )
    draws = np.random.default_rng(seed).integers(x.shape[0], size=(resamples, x.shape[0]))
    estimates = np.stack([statistic(x[draw], axis=0) for draw in draws])
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(estimates, [tail, 100.0 - tail], axis=0)
    return low, high
