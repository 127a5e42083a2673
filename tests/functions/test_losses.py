from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.functions import losses

ONES = jnp.ones(4)
both = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])


@both
def test_loss_weights(wrap: Callable) -> None:
    valid = jnp.array([True, True, False, True])
    weights = wrap(losses.loss_weights)(valid)
    np.testing.assert_allclose(weights, [4 / 3, 4 / 3, 0, 4 / 3], rtol=1e-6)
    x = jnp.array([1.0, 2.0, 100.0, 6.0])
    np.testing.assert_allclose(losses.weighted_mean(x, weights), 3.0, rtol=1e-6)
    np.testing.assert_array_equal(wrap(losses.loss_weights)(jnp.zeros(3, bool)), [0, 0, 0])


def test_the_mean_over_replicas_is_the_mean_over_the_batch() -> None:
    x = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    valid = jnp.array([[True, True, True], [True, False, False]])

    def replica(x: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        def mean(y: jax.Array) -> jax.Array:
            return jax.lax.pmean(y, "replica")

        weights = losses.loss_weights(valid, mean)
        return mean(losses.weighted_mean(x, weights)), losses.standardize(x, weights, mean)

    means, standard = jax.vmap(replica, axis_name="replica")(x, valid)
    np.testing.assert_allclose(means, [2.5, 2.5], rtol=1e-6)
    np.testing.assert_allclose(
        standard, losses.standardize(x, losses.loss_weights(valid)), rtol=1e-5
    )


@both
def test_standardize(wrap: Callable) -> None:
    # Mean 3 and variance (4 + 0 + 4) / 3 over the valid three.
    weights = losses.loss_weights(jnp.array([1, 1, 0, 1], bool))
    found = wrap(losses.standardize)(jnp.array([1.0, 3.0, 50.0, 5.0]), weights)
    np.testing.assert_allclose(found[jnp.array([0, 1, 3])], [-1.2247449, 0, 1.2247449], atol=1e-6)


@both
def test_policy_gradient(wrap: Callable) -> None:
    found, gradient = wrap(jax.value_and_grad(losses.policy_gradient, argnums=(0, 1)))(
        jnp.array([-1.0, -2.0]), jnp.array([3.0, 5.0]), jnp.ones(2)
    )
    np.testing.assert_allclose(found, 6.5)
    np.testing.assert_allclose(gradient[0], [-1.5, -2.5])
    np.testing.assert_array_equal(gradient[1], [0, 0])


@both
def test_clipped_surrogate(wrap: Callable) -> None:
    # Ratios 2, 2, 0.5, 0.5 and clip 0.2: min(2, 1.2), min(-2, -1.2), min(0.5, 0.8), min(-0.5, -0.8)
    log_probs = jnp.log(jnp.array([2.0, 2.0, 0.5, 0.5]))
    advantages = jnp.array([1.0, -1.0, 1.0, -1.0])
    found, gradient = wrap(jax.value_and_grad(losses.clipped_surrogate))(
        log_probs, jnp.zeros(4), advantages, 0.2, ONES
    )
    np.testing.assert_allclose(found, -(1.2 - 2 + 0.5 - 0.8) / 4, rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, 0.5, -0.125, 0], atol=1e-6)


@both
def test_clip_fraction(wrap: Callable) -> None:
    log_probs = jnp.log(jnp.array([1.1, 1.3, 0.7, 0.9]))
    found = wrap(losses.clip_fraction)(log_probs, jnp.zeros(4), 0.2, ONES)
    np.testing.assert_allclose(found, 0.5)
    shifted = wrap(losses.clip_fraction)(log_probs - 2.0, jnp.full(4, -2.0), 0.05, ONES)
    np.testing.assert_allclose(shifted, 1.0)
    one_of_four = jnp.log(jnp.array([1.1, 1.3, 0.9, 1.0]))
    found = wrap(losses.clip_fraction)(one_of_four, jnp.zeros(4), 0.2, ONES)
    np.testing.assert_allclose(found, 0.25)
    valid_only = losses.loss_weights(jnp.array([1, 0, 1, 0], bool))
    np.testing.assert_allclose(
        wrap(losses.clip_fraction)(log_probs, jnp.zeros(4), 0.2, valid_only), 0.5
    )


@both
def test_value_loss(wrap: Callable) -> None:
    found = wrap(losses.value_loss)(jnp.array([1.0, 2.0]), jnp.array([4.0, 2.0]), jnp.ones(2))
    np.testing.assert_allclose(found, 0.5 * (9 + 0) / 2)


@both
def test_clipped_value_loss(wrap: Callable) -> None:
    # Old value 0, clip 1. v = 3 against 4: kept at 1, so (1 - 4)² = 9 is worse than 1.
    # v = 3 against 1: its own (3 - 1)² = 4 is worse than 0. v = 0.5 against 0: 0.25 either way.
    values, targets = jnp.array([3.0, 3.0, 0.5]), jnp.array([4.0, 1.0, 0.0])
    found, gradient = wrap(jax.value_and_grad(losses.clipped_value_loss))(
        values, jnp.zeros(3), targets, 1.0, jnp.ones(3)
    )
    np.testing.assert_allclose(found, 0.5 * (9 + 4 + 0.25) / 3, rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, 2 / 3, 0.5 / 3], rtol=1e-6)


@both
def test_clipped_value_loss_is_clipped_around_the_old_value(wrap: Callable) -> None:
    # Old values 10, 10, -5 and 10, clip 1. v = 7 against 6: kept at 9, (9 - 6)² = 9.
    # v = 10.5 against 10: not clipped, 0.25. v = -3 against -2: kept at -4, (-4 + 2)² = 4.
    # v = 7 against 8.5: kept at 9, 0.25, but its own 2.25 is worse.
    values, old = jnp.array([7.0, 10.5, -3.0, 7.0]), jnp.array([10.0, 10.0, -5.0, 10.0])
    targets = jnp.array([6.0, 10.0, -2.0, 8.5])
    found, gradient = wrap(jax.value_and_grad(losses.clipped_value_loss, argnums=(0, 2)))(
        values, old, targets, 1.0, ONES
    )
    np.testing.assert_allclose(found, 0.5 * (9 + 0.25 + 4 + 2.25) / 4, rtol=1e-6)
    np.testing.assert_allclose(gradient[0], [0, 0.5 / 4, 0, -1.5 / 4], rtol=1e-6)
    np.testing.assert_array_equal(gradient[1], [0, 0, 0, 0])


@both
def test_entropy_loss(wrap: Callable) -> None:
    weights = losses.loss_weights(jnp.array([1, 1, 0], bool))
    found = wrap(losses.entropy_loss)(jnp.array([1.0, 2.0, 9.0]), weights)
    np.testing.assert_allclose(found, -1.5, rtol=1e-6)


@both
def test_approximate_kl(wrap: Callable) -> None:
    # ρ = 2 and 0.5: (1 - log 2 + -0.5 + log 2) / 2 = 0.25
    found = wrap(losses.approximate_kl)(jnp.log(jnp.array([2.0, 0.5])), jnp.zeros(2), jnp.ones(2))
    np.testing.assert_allclose(found, 0.25, rtol=1e-6)
    # ρ = 3 from log-probabilities that are not 0: 2 - log 3
    ratio = jnp.log(jnp.array([6.0])), jnp.log(jnp.array([2.0]))
    found = wrap(losses.approximate_kl)(*ratio, jnp.ones(1))
    np.testing.assert_allclose(found, 0.90138771, rtol=1e-5)


@both
def test_explained_variance(wrap: Callable) -> None:
    targets = jnp.array([1.0, 2.0, 3.0, 4.0])
    explained = wrap(losses.explained_variance)
    np.testing.assert_allclose(explained(targets + 7.0, targets, ONES), 1.0, atol=1e-6)
    np.testing.assert_allclose(explained(jnp.zeros(4), targets, ONES), 0.0, atol=1e-6)
    np.testing.assert_allclose(explained(targets / 2, targets, ONES), 0.75, rtol=1e-6)
    np.testing.assert_array_equal(explained(targets, ONES, ONES), 0.0)
    weights = losses.loss_weights(jnp.array([1, 1, 1, 0], bool))
    values = targets.at[3].set(-50.0)
    np.testing.assert_allclose(explained(values, targets, weights), 1.0, atol=1e-6)
    # a variance below one, and a constant
    np.testing.assert_allclose(explained(targets / 8, targets / 4, ONES), 0.75, rtol=1e-6)


def test_a_ratio_on_the_bound_is_not_clipped() -> None:
    assert losses.clip_fraction(jnp.zeros(4), jnp.zeros(4), 0.0, ONES) == 0


def test_standardize_adds_a_little_to_the_variance() -> None:
    """So that what hardly varies is not blown up: 1e-4 / √(1e-8 + 1e-8)."""
    found = losses.standardize(jnp.array([1e-4, -1e-4]), jnp.ones(2))
    np.testing.assert_allclose(found, [0.70710678, -0.70710678], rtol=1e-5)
