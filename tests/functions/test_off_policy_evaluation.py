"""Off-policy estimates: against written numbers, and against the values of a small MDP."""

import functools

import numpy as np
import pytest
from small_mdp import (
    BEHAVIOR,
    DISCOUNT,
    TARGET,
    Lived,
    action_values,
    live,
    ratios,
    value,
)

from dovetail.functions import off_policy_evaluation as ope

RATIOS = np.array([[2.0, 0.5, 1.0], [0.5, 1.0, 1.0]])
REWARDS = np.array([[1.0, 2.0, 4.0], [3.0, 0.0, 0.0]])


def test_written_numbers() -> None:
    # weights 2·½·1 = 1 and ½; returns 1 + ½·2 + ¼·4 = 3 and 3
    found = ope.ordinary(RATIOS, REWARDS, 0.5)
    assert found.values.tolist() == [3.0, 1.5] and ope.weighted_mean(found) == 2.25
    assert ope.weighted_mean(ope.weighted(RATIOS, REWARDS, 0.5)) == 3.0  # 4.5 / 1.5
    # 2·1 + 1·½·2 + 1·¼·4 = 4 and ½·3
    found = ope.per_decision(RATIOS, REWARDS, 0.5)
    assert found.values.tolist() == [4.0, 1.5] and ope.weighted_mean(found) == 2.75
    # (2·1 + ½·3) / 2.5 + ½·(1·2) / 1.5 + ¼·(1·4) / 1.5
    wanted = 3.5 / 2.5 + 1 / 1.5 + 1 / 1.5
    found = ope.weighted_per_decision(RATIOS, REWARDS, 0.5)
    np.testing.assert_allclose(ope.weighted_mean(found), wanted)
    # weights 1 and ½: 1.5² / 1.25
    np.testing.assert_allclose(ope.effective_episodes(RATIOS), 1.8)
    # and of a tenth of each: (0.1 + 0.05)² / (0.01 + 0.0025)
    np.testing.assert_allclose(ope.effective_episodes([np.array([0.1]), np.array([0.05])]), 1.8)


def test_doubly_robust_numbers() -> None:
    action = np.array([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
    values = np.array([[1.0, 2.0, 3.0, 0.0], [2.0, 0.0, 0.0, 0.0]])
    found = ope.doubly_robust(RATIOS, REWARDS, action, values, 0.5)
    # 1 + 2·(1 + ½·2 - 1) + ½·1·(2 + ½·3 - 2) + ¼·1·(4 - 3); 2 + ½·(3 - 4)
    assert found.values.tolist() == [1 + 2 + 0.75 + 0.25, 1.5]
    # weights that single floats do not hold
    large, singles = [np.array([1e30, 1e30])], np.zeros(3, np.float32)
    found = ope.doubly_robust(large, large, [singles[1:]], [singles], 1.0)
    np.testing.assert_allclose(found.values, [1e90])


def test_episodes_may_be_of_any_length() -> None:
    """What a table says that is filled up with rewards of 0 and ratios of 1."""
    rng, lengths = np.random.default_rng(0), (7, 1, 3, 7, 2)
    ratios = np.ones((5, 7))
    rewards, taken, values = np.zeros((5, 7)), np.zeros((5, 7)), np.zeros((5, 8))
    for row, steps in enumerate(lengths):
        ratios[row, :steps] = rng.uniform(0, 2, steps)
        rewards[row, :steps], taken[row, :steps] = rng.normal(size=(2, steps))
        values[row, :steps] = rng.normal(size=steps)
    ratios[0, 3] = 0.0

    def ragged(table: np.ndarray, more: int = 0) -> list[np.ndarray]:
        return [line[: steps + more] for line, steps in zip(table, lengths, strict=True)]

    lived = ragged(ratios), ragged(rewards)
    for estimator in (ope.ordinary, ope.weighted, ope.per_decision, ope.weighted_per_decision):
        wanted = ope.pseudo_values(estimator(ratios, rewards, 0.9))
        found = ope.pseudo_values(estimator(*lived, 0.9))
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
    robust = ope.doubly_robust(*lived, ragged(taken), ragged(values, 1), 0.9)
    wanted = ope.doubly_robust(ratios, rewards, taken, values, 0.9)
    np.testing.assert_allclose(robust.values, wanted.values, rtol=1e-12)
    # step by step: the quotients of sums over all episodes, each with its weight so far
    weights, gamma = np.cumprod(ratios, axis=1), 0.9 ** np.arange(7)
    quotients = (weights * rewards * gamma).sum(axis=0) / weights.sum(axis=0)
    influence = (weights * (rewards * gamma - quotients) / weights.mean(axis=0)).sum(axis=1)
    found = ope.pseudo_values(ope.weighted_per_decision(*lived, 0.9))
    np.testing.assert_allclose(found, quotients.sum() + influence)
    np.testing.assert_allclose(found.mean(), quotients.sum())


def test_one_long_episode_among_many_short_ones() -> None:
    """A table of them would take 80 GB."""
    ratios = [np.ones(500_000), *[np.ones(1)] * 20_000]
    found = ope.weighted_per_decision(ratios, ratios, 0.5)
    np.testing.assert_allclose(ope.weighted_mean(found), 1 + 1 / 20_001)


@pytest.mark.parametrize(("tiny", "wanted"), [(1e-30, 7.0), (1e-280, 7.0), (1e-310, 0.0)])
def test_tiny_weights_count_by_their_ratios(tiny: float, wanted: float) -> None:
    """As after many steps that the policy would hardly have taken; in the end none is left."""
    ratios = [np.array([1.0, tiny, 1.0]), np.array([1.0, 3 * tiny, 1.0, 1.0]), np.array([1.0, 0.0])]
    rewards = [np.array([0.0, 0.0, 4.0]), np.array([0.0, 0.0, 0.0, 8.0]), np.array([0.0, 0.0])]
    found = ope.pseudo_values(ope.weighted_per_decision(ratios, rewards, 1.0))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found.mean(), wanted)  # 4 · ¼ + 8 · ¾


def test_as_many_rewards_as_ratios() -> None:
    for estimator in (ope.per_decision, ope.weighted_per_decision):
        with pytest.raises(ValueError, match="argument 2 is shorter"):
            estimator(RATIOS, REWARDS[:1], 0.5)
    with pytest.raises(ValueError, match="argument 4 is shorter"):
        ope.doubly_robust(RATIOS, REWARDS, REWARDS, np.zeros((1, 4)), 0.5)


def test_no_weight_left() -> None:
    none = np.zeros((3, 2))
    found = ope.weighted(none, np.ones((3, 2)), 0.9)
    assert np.isnan(ope.weighted_mean(found))
    found = ope.weighted_per_decision(none, np.ones((3, 2)), 0.9)
    assert np.isnan(ope.weighted_mean(found))
    assert ope.effective_episodes(none) == 0
    assert ope.weighted_mean(ope.ordinary(none, np.ones((3, 2)), 0.9)) == 0


def slow_interval(
    x: np.ndarray, confidence: float, seed: int, resamples: int
) -> tuple[float, float]:
    """The studentized bootstrap of a mean, as textbooks have it."""
    rng, count, mean = np.random.default_rng(seed), len(x), sum(x) / len(x)

    def error(y: np.ndarray) -> float:
        return float(sum((y - sum(y) / count) ** 2) / (count - 1) / count) ** 0.5

    draws = [x[rng.integers(count, size=count)] for _ in range(resamples)]
    scores = sorted((sum(y) / count - mean) / max(error(y), error(x) / 1000) for y in draws)
    tail = (1 - confidence) / 2 * (resamples - 1)
    low, high = np.interp([tail, resamples - 1 - tail], range(resamples), scores)
    return mean - high * error(x), mean - low * error(x)


def test_the_interval_is_the_textbooks() -> None:
    plain = ope.Contributions(np.array([1.0, 2.0, 4.0, 9.0]), np.ones(4))
    found = ope.interval(plain)
    np.testing.assert_allclose(found, slow_interval(plain.values, 0.95, 0, 1000), rtol=1e-12)
    np.testing.assert_allclose(found, [0.695190, 20.104593], rtol=1e-5)
    found = ope.interval(plain, 0.5, seed=3, resamples=50)
    np.testing.assert_allclose(found, slow_interval(plain.values, 0.5, 3, 50), rtol=1e-12)
    # weights ½, 1, ¼ and ¼ have the mean ½; the quotient is 4 / ½ = 8
    quotient = plain._replace(weights=np.array([0.5, 1.0, 0.25, 0.25]))
    parts = np.array([2.0, -4.0, 12.0, 22.0])
    np.testing.assert_allclose(ope.pseudo_values(quotient), parts)
    np.testing.assert_allclose(
        ope.interval(quotient), slow_interval(parts, 0.95, 0, 1000), rtol=1e-12
    )


def test_intervals_of_one_episode_and_of_equal_ones() -> None:
    assert np.isnan(ope.interval(ope.Contributions(np.ones(1), np.ones(1)))).all()
    assert ope.interval(ope.Contributions(np.full(2, 3.0), np.ones(2))) == (3.0, 3.0)
    small = ope.interval(ope.Contributions(np.array([0.1, 0.2, 0.4]), np.ones(3)))
    assert small[0] < 0.7 / 3 < small[1]


def contributions(lived: Lived) -> dict[str, ope.Contributions]:
    """Every estimator on episodes of BEHAVIOR; the doubly robust one with wrong values too."""
    seen = ratios(lived, TARGET, BEHAVIOR)
    arguments = (seen, lived.rewards, DISCOUNT)
    alive = lived.states >= 0
    after = np.pad(alive, ((0, 0), (0, 1)))
    states = np.pad(lived.states, ((0, 0), (0, 1)))

    def robust(q: np.ndarray, ratio: np.ndarray) -> ope.Contributions:
        v = (TARGET * q).sum(axis=1)
        taken = np.where(alive, q[lived.states, lived.actions], 0)
        return ope.doubly_robust(
            ratio, lived.rewards, taken, np.where(after, v[states], 0), DISCOUNT
        )

    right = action_values(TARGET)
    return {
        "ordinary": ope.ordinary(*arguments),
        "weighted": ope.weighted(*arguments),
        "per decision": ope.per_decision(*arguments),
        "weighted per decision": ope.weighted_per_decision(*arguments),
        "doubly robust": robust(right, seen),
        "doubly robust, wrong values": robust(right + 0.5, seen),
    }


NAMES = list(contributions(live(BEHAVIOR, 2, 0)))


@functools.cache
def datasets() -> list[dict[str, ope.Contributions]]:
    return [contributions(live(BEHAVIOR, 200, seed=100 + seed)) for seed in range(80)]


@functools.cache
def large() -> dict[str, ope.Contributions]:
    lived = live(BEHAVIOR, 30_000, seed=1)
    assert lived.lengths.max() < 60
    return contributions(lived)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_episodes_lead_to_the_known_value(name: str) -> None:
    np.testing.assert_allclose(value(TARGET), 2.2224, atol=1e-4)
    assert value(BEHAVIOR) < value(TARGET) - 0.2
    found = ope.weighted_mean(large()[name])
    assert abs(found - value(TARGET)) < 0.06


def test_values_without_ratios_are_right_too() -> None:
    """Doubly robust: with true values the ratios may be wrong, if they do not look ahead."""
    lived = live(BEHAVIOR, 30_000, seed=2)
    q = action_values(TARGET)
    v = (TARGET * q).sum(axis=1)
    alive = lived.states >= 0
    states = np.pad(lived.states, ((0, 0), (0, 1)))
    after = np.where(np.pad(alive, ((0, 0), (0, 1))), v[states], 0)
    taken = np.where(alive, q[lived.states, lived.actions], 0)
    wrong = np.full(lived.rewards.shape, 0.9)
    found = ope.doubly_robust(wrong, lived.rewards, taken, after, DISCOUNT)
    assert abs(ope.weighted_mean(found) - value(TARGET)) < 0.04


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_intervals_cover_the_value_as_often_as_they_say(name: str) -> None:
    """Of 80 datasets of 200 episodes; heavy weights make a few per cent less of 95 %."""
    known, covered, widths = value(TARGET), 0, []
    for seed, found in enumerate(datasets()):
        low, high = ope.interval(found[name], seed=seed, resamples=150)
        covered += low <= known <= high
        widths.append(high - low)
    assert 0.87 <= covered / 80 <= 1.0, covered
    assert 0.05 < np.mean(widths) < 3


def test_the_better_estimators_are_better() -> None:
    """In mean squared error over the datasets."""
    mean = {
        name: np.mean(
            [(ope.weighted_mean(found[name]) - value(TARGET)) ** 2 for found in datasets()]
        )
        for name in NAMES
    }
    assert mean["weighted"] < mean["ordinary"]
    assert mean["per decision"] < mean["ordinary"]
    assert mean["doubly robust"] < 0.5 * mean["per decision"]
