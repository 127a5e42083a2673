"""Distributions of returns, against written numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.functions.value_distributions import (
    atoms,
    categorical_td,
    cross_entropy,
    divergence,
    expected,
    project,
    quantile_huber_loss,
)

SUPPORT = atoms(0.0, 4.0, 5)


def test_atoms_are_even() -> None:
    np.testing.assert_allclose(SUPPORT, [0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    ("values", "probabilities", "projected"),
    [
        ([0, 1, 2, 3, 4], [0.1, 0.2, 0.3, 0.2, 0.2], [0.1, 0.2, 0.3, 0.2, 0.2]),
        # 1.25 is shared 3 : 1 by its neighbors, 2.5 in halves
        ([1.25, 2.5, 3, 3, 3], [0.4, 0.6, 0, 0, 0], [0, 0.3, 0.4, 0.3, 0]),
        # what lies beyond an end goes to it
        ([-7, -0.5, 4.5, 9, 4], [0.1, 0.2, 0.3, 0.3, 0.1], [0.3, 0, 0, 0, 0.7]),
        # a terminated episode: the reward is all
        ([2, 2, 2, 2, 2], [0.2, 0.2, 0.2, 0.2, 0.2], [0, 0, 1, 0, 0]),
    ],
)
def test_probabilities_move_to_the_neighbors(
    values: list[float], probabilities: list[float], projected: list[float]
) -> None:
    given = jnp.array([values], jnp.float32), jnp.array([probabilities], jnp.float32)
    for function in (project, jax.jit(project)):
        np.testing.assert_allclose(function(*given, SUPPORT)[0], projected, atol=1e-6)


def test_the_projection_keeps_the_mean() -> None:
    values = jnp.array([0.3, 1.7, 2.2, 3.9, 0.0])
    probabilities = jnp.array([0.5, 0.1, 0.2, 0.1, 0.1])
    projected = project(values, probabilities, SUPPORT)
    assert float(projected @ SUPPORT) == pytest.approx(float(values @ probabilities), rel=1e-6)


def test_the_mean_of_a_distribution() -> None:
    logits = jnp.log(jnp.array([0.1, 0.2, 0.3, 0.2, 0.2])) - 5.0
    assert float(expected(logits, SUPPORT)) == pytest.approx(2.2, rel=1e-5)


def test_cross_entropy() -> None:
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])) + 3.0
    found = cross_entropy(logits, jnp.array([[1.0, 0, 0], [0.5, 0.5, 0]]))
    np.testing.assert_allclose(found, [np.log(2), 1.5 * np.log(2)], rtol=1e-5)


def test_divergence() -> None:
    """A half and a half in place of a half and two quarters; and nothing from itself."""
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])) + 3.0
    found = divergence(logits, jnp.array([[0.5, 0.5, 0], [0.5, 0.25, 0.25]]))
    np.testing.assert_allclose(found, [0.5 * np.log(2), 0.0], atol=1e-6)


def test_categorical_td_by_hand() -> None:
    """On atoms 0 and 4, a following ¼ and ¾ discounted by ½ stand at 1 and 3 after a reward of 1:
    ¾·¼ + ¼·¾ = ⅜ go to the lower atom. Without a discount the reward 3 is ¼ and ¾."""
    logits = jnp.log(jnp.array([[0.5, 0.5], [0.25, 0.75]]))
    following = jnp.log(jnp.array([[0.25, 0.75], [0.9, 0.1]]))
    losses, errors = categorical_td(
        logits, jnp.array([1.0, 3.0]), jnp.array([0.5, 0.0]), following, jnp.array([0.0, 4.0])
    )
    entropy = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))
    np.testing.assert_allclose(losses, [np.log(2), entropy], rtol=1e-6)
    apart = np.log(2) + 0.375 * np.log(0.375) + 0.625 * np.log(0.625)
    np.testing.assert_allclose(errors, [apart, 0.0], atol=1e-6)


def test_quantile_regression_by_hand() -> None:
    """Two quantiles, middles 0.25 and 0.75, on two samples.

    Errors of the first, 1: 2 and -1, whose Huber losses are 1.5 and 0.5; weights 0.25 and 0.75.
    Errors of the second, 4: -1 and -4, whose losses are 0.5 and 3.5; weights 0.25 each.
    """
    found = quantile_huber_loss(jnp.array([[1.0, 4.0]]), jnp.array([[3.0, 0.0]]))
    wanted = (0.25 * 1.5 + 0.75 * 0.5) / 2 + (0.25 * 0.5 + 0.25 * 3.5) / 2
    np.testing.assert_allclose(found, [wanted], rtol=1e-6)


def test_a_larger_threshold_squares_more() -> None:
    one, two = jnp.array([[0.0]]), jnp.array([[4.0]])
    np.testing.assert_allclose(quantile_huber_loss(one, two, 8.0), [0.5 * 8.0 / 8.0])
    np.testing.assert_allclose(quantile_huber_loss(one, two, 2.0), [0.5 * (2.0 + 4.0) / 2.0])


def test_quantile_regression_finds_the_quantiles() -> None:
    """Of the numbers 0 … 99 those below which a tenth, three tenths, … of them lie."""
    samples, quantiles = jnp.arange(100.0) / 100, jnp.full(5, 0.5)
    step = jax.jit(jax.grad(lambda q: quantile_huber_loss(q, samples, 0.01)))
    for _ in range(400):
        quantiles = quantiles - 0.02 * step(quantiles)
    np.testing.assert_allclose(quantiles, [0.1, 0.3, 0.5, 0.7, 0.9], atol=0.02)


def test_a_support_that_does_not_begin_at_zero() -> None:
    """-3, -1, 1, 3: 0 is shared by its neighbours, -2.5 is 3 : 1, 5 goes to the end."""
    values, probabilities = jnp.array([0.0, -2.5, 5.0]), jnp.array([0.2, 0.4, 0.4])
    found = project(values, probabilities, atoms(-3.0, 3.0, 4))
    np.testing.assert_allclose(found, [0.3, 0.2, 0.1, 0.4], atol=1e-6)


def test_axes_before_the_last_are_batches() -> None:
    rng = np.random.default_rng(0)
    logits, weights = jnp.array(rng.normal(size=(2, 2, 3, 5)), jnp.float32)
    probabilities, targets = jax.nn.softmax(weights), weights[..., :4]
    support = atoms(-2.0, 2.0, 5)
    whole = [
        expected(logits, support),
        cross_entropy(logits, probabilities),
        divergence(logits, probabilities),
        quantile_huber_loss(logits, targets),
    ]
    projected = project(logits, probabilities, support)
    for at in np.ndindex(2, 3):
        one = [
            expected(logits[at], support),
            cross_entropy(logits[at], probabilities[at]),
            divergence(logits[at], probabilities[at]),
            quantile_huber_loss(logits[at], targets[at]),
        ]
        np.testing.assert_allclose([found[at] for found in whole], one, rtol=1e-5, atol=1e-6)
        alone = project(logits[at], probabilities[at], support)
        np.testing.assert_allclose(projected[at], alone, rtol=1e-5, atol=1e-6)


def test_quantile_regression_on_more_targets_than_quantiles() -> None:
    """One quantile, the median, on 0, 0 and 3: Huber losses 0, 0 and 2.5, each weighed by half."""
    found = quantile_huber_loss(jnp.array([0.0]), jnp.array([0.0, 0.0, 3.0]))
    np.testing.assert_allclose(found, 0.5 * 2.5 / 3, rtol=1e-6)
