import numpy as np
import pytest

from dovetail.errors import UserError
from dovetail.functions.statistics import bootstrap_interval, interquartile_mean


def test_interquartile_mean_leaves_out_a_quarter_at_each_end() -> None:
    assert interquartile_mean(np.array([-1000, 1, 2, 3, 4, 5, 6, 9999])) == 3.5
    assert interquartile_mean(np.array([100.0, 1.0, 2.0, 3.0, -7.0])) == 2.0
    assert interquartile_mean(np.array([1.0, 2.0, 6.0])) == 3.0


def test_interquartile_mean_of_curves_is_taken_point_by_point() -> None:
    curves = np.array([[0, 10], [1, 40], [2, 20], [90, 30]])
    np.testing.assert_array_equal(interquartile_mean(curves), [1.5, 25])
    np.testing.assert_array_equal(interquartile_mean(curves.T, axis=1), [1.5, 25])


def test_bootstrap_interval_of_a_mean_has_the_textbook_width() -> None:
    x = np.random.default_rng(0).normal(5.0, 2.0, 400)
    low, high = bootstrap_interval(x, np.mean)
    error = 1.96 * x.std() / np.sqrt(400)
    np.testing.assert_allclose([low, high], [x.mean() - error, x.mean() + error], atol=0.02)


def test_bootstrap_interval_of_curves_draws_whole_seeds() -> None:
    # The second point is the first plus one in every seed: so are the ends of its interval.
    first = np.arange(8.0)
    low, high = bootstrap_interval(np.stack([first, first + 1.0], axis=1))
    assert low.shape == high.shape == (2,)
    np.testing.assert_allclose([low[1] - low[0], high[1] - high[0]], [1.0, 1.0])
    assert low[0] < 3.5 < high[0]


def test_bootstrap_interval_is_repeatable_and_narrows_with_confidence() -> None:
    x = np.arange(10.0)
    assert bootstrap_interval(x, seed=3) == bootstrap_interval(x, seed=3)
    wide, narrow = bootstrap_interval(x, confidence=0.95), bootstrap_interval(x, confidence=0.5)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_one_seed_has_an_interval_of_no_width() -> None:
    assert bootstrap_interval(np.array([3.0])) == (3.0, 3.0)


def test_mistakes_are_sentences() -> None:
    with pytest.raises(UserError, match="at least one seed"):
        bootstrap_interval(np.array([]))
    with pytest.raises(UserError, match=r"between 0 and 1, but was given 95\."):
        bootstrap_interval(np.arange(3.0), confidence=95)
    with pytest.raises(UserError, match="at least one seed"):
        bootstrap_interval(np.array(3.0))
    for confidence in (0.0, 1.0):
        with pytest.raises(UserError, match="between 0 and 1"):
            bootstrap_interval(np.arange(3.0), confidence=confidence)


def slow_interval(x: np.ndarray, confidence: float, seed: int, resamples: int) -> list[float]:
    """The percentiles of the interquartile means of resampled seeds, sorted by hand."""
    draws = np.random.default_rng(seed).integers(len(x), size=(resamples, len(x)))
    cut = len(x) // 4
    means = sorted(sum(sorted(x[draw])[cut : len(x) - cut]) / (len(x) - 2 * cut) for draw in draws)
    tail = (1 - confidence) / 2 * (resamples - 1)
    return np.interp([tail, resamples - 1 - tail], range(resamples), means).tolist()


def test_the_interval_is_made_of_percentiles() -> None:
    x = np.arange(10.0) ** 2
    np.testing.assert_allclose(bootstrap_interval(x), slow_interval(x, 0.95, 0, 2000))
    found = bootstrap_interval(x, confidence=0.5, seed=1, resamples=100)
    np.testing.assert_allclose(found, slow_interval(x, 0.5, 1, 100))
    np.testing.assert_allclose(found, [16.791667, 31.5], rtol=1e-6)
