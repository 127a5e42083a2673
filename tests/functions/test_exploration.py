"""Exploration: how many actions are random, and which."""

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.functions.exploration import (
    add_noise,
    epsilon_greedy,
    epsilon_greedy_log_prob,
    ladder,
    linear,
)


def test_the_schedule_falls_and_stays() -> None:
    at = jnp.array([0, 25, 50, 100, 1000])
    np.testing.assert_allclose(linear(1.0, 0.2, 100, at), [1.0, 0.8, 0.6, 0.2, 0.2], rtol=1e-6)
    np.testing.assert_allclose(linear(1.0, 0.2, 0, jnp.array([0, 1])), [1.0, 0.2])


def test_a_share_of_actions_is_random() -> None:
    keys = jax.random.split(jax.random.key(0), 4000)
    values = jnp.array([0.0, 3.0, 1.0, 2.0])
    chosen = jax.vmap(epsilon_greedy, (0, None, None))(keys, values, jnp.float32(0.4))
    shares = np.bincount(np.asarray(chosen), minlength=4) / len(keys)
    np.testing.assert_allclose(shares, [0.1, 0.7, 0.1, 0.1], atol=0.02)
    greedy = jax.vmap(epsilon_greedy, (0, None, None))(keys[:50], values, jnp.float32(0.0))
    assert set(greedy.tolist()) == {1}
    chances = jnp.exp(epsilon_greedy_log_prob(values, 0.4, jnp.arange(4)))
    np.testing.assert_allclose(chances, [0.1, 0.7, 0.1, 0.1], rtol=1e-5)
    assert epsilon_greedy_log_prob(values, 0.0, jnp.int32(0)) == -np.inf


def test_the_ladder_goes_from_the_first_share_to_nearly_none() -> None:
    found = ladder(0.4, 7.0, jnp.arange(8), 8)
    wanted = [0.4, 0.16, 0.064, 0.0256, 0.01024, 0.004096, 0.0016384, 0.00065536]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert float(ladder(0.4, 7.0, 0, 1)) == np.float32(0.4)
    np.testing.assert_allclose(ladder(0.4, 7.0, jnp.arange(2), 2), [0.4, 0.4**8], rtol=1e-5)


def test_noise_stays_within_the_bounds() -> None:
    keys = jax.random.split(jax.random.key(0), 2000)
    noisy = jax.vmap(lambda key: add_noise(key, jnp.array([0.0, 0.9]), 0.2))(keys)
    free, near = np.asarray(noisy).T
    np.testing.assert_allclose([free.mean(), free.std()], [0.0, 0.2], atol=0.02)
    assert near.max() == 1.0
    np.testing.assert_allclose(np.mean(near == 1.0), 0.309, atol=0.04)  # beyond half a deviation
    low = jax.vmap(lambda key: add_noise(key, jnp.array(-0.9), 0.2))(keys)
    assert low.min() == -1.0
    np.testing.assert_allclose(np.mean(np.asarray(low) == -1.0), 0.309, atol=0.04)
