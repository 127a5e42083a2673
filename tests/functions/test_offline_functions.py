"""The equations of offline learning, against written numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.functions.offline import advantage_weights, conservative_gap, expectile_loss


def test_expectile_loss() -> None:
    errors = jnp.array([-2.0, 0.0, 3.0])
    np.testing.assert_allclose(expectile_loss(errors, 0.7), [1.2, 0.0, 6.3], rtol=1e-6)
    np.testing.assert_allclose(expectile_loss(errors, 0.5), [2.0, 0.0, 4.5], rtol=1e-6)


@pytest.mark.parametrize(("expectile", "wanted"), [(0.5, 2.5), (0.9, 7.5), (0.999, 9.97006)])
def test_the_best_value_is_an_expectile(expectile: float, wanted: float) -> None:
    """Of 0, 0, 0 and 10: where the loss is least; its τ-expectile is 10 τ / (τ + 3 (1 - τ))."""
    targets = jnp.array([0.0, 0.0, 0.0, 10.0])
    exact = 10 * expectile / (expectile + 3 * (1 - expectile))
    slope = jax.grad(lambda v: expectile_loss(targets - v, expectile).sum())
    assert exact == pytest.approx(wanted, rel=1e-4)
    assert abs(float(slope(exact))) < 1e-4
    assert float(slope(exact - 0.1)) < 0 < float(slope(exact + 0.1))


def test_better_actions_weigh_more() -> None:
    advantages = jnp.array([-1.0, 0.0, 1.0, 9.0])
    found = advantage_weights(advantages, 2.0, 50.0)
    np.testing.assert_allclose(found, [0.135335, 1.0, 7.389056, 50.0], rtol=1e-5)
    np.testing.assert_allclose(advantage_weights(advantages, 0.0, 50.0), np.ones(4))
    slopes = jax.grad(lambda a: advantage_weights(a, 2.0, 50.0).sum())(advantages)
    np.testing.assert_array_equal(slopes, np.zeros(4))


def test_conservative_gap_of_every_action() -> None:
    values = jnp.array([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])  # two states, three actions
    found = conservative_gap(values, jnp.array([3.0, 0.0]))
    np.testing.assert_allclose(found, [0.407606, 1.098612], rtol=1e-5)


def test_conservative_gap_of_sampled_actions() -> None:
    """Values a² on [-1, 1]: log ∫ exp(a²) da = log 2.925304; the estimate comes near."""
    actions = jax.random.uniform(jax.random.key(0), (20_000,), minval=-1.0, maxval=1.0)
    densities = jnp.full(20_000, jnp.log(0.5) + jnp.log(20_000.0))
    found = conservative_gap(jnp.square(actions), jnp.float32(0.0), densities)
    assert float(found) == pytest.approx(1.073399, abs=0.01)
