import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.blocks.offline import (
    bounded_log_prob,
    bounded_sample,
    init_policy,
    negative_log_likelihood,
    recorded_rows,
)
from dovetail.blocks.replayed import Batch
from dovetail.envs.interface import Continuous, Discrete
from dovetail.functions.distributions import Categorical, Gaussian
from dovetail.networks.policy_network import PolicyNetwork


def test_recorded_actions_are_clipped_inside_their_bounds():
    action = np.array([[-1.0], [0.5], [1.5]], np.float32)
    rows = SimpleNamespace(observation=1, action=action, reward=2, terminated=3)
    kept = recorded_rows(Continuous(1, bounded=True), rows)
    np.testing.assert_allclose(kept.action[:, 0], [-0.99999, 0.5, 0.99999], rtol=1e-7)
    assert (kept.observation, kept.reward, kept.terminated) == (1, 2, 3)
    rows.action = np.array([0, 4])
    assert recorded_rows(Discrete(5), rows).action is rows.action


def test_a_continuous_policy_has_a_deviation_of_its_own():
    network = PolicyNetwork(jax.ShapeDtypeStruct((3,), jnp.float32), 2, (4,))
    assert init_policy(network, Continuous(2, bounded=True), jax.random.key(0))[
        "log_std"
    ].tolist() == [0.0, 0.0]
    assert "log_std" not in init_policy(network, Discrete(2), jax.random.key(0))


def test_samples_are_clipped_and_their_probability_is_that_of_the_tail():
    policy = Gaussian(jnp.zeros(1), jnp.zeros(1))
    keys = jax.random.split(jax.random.key(0), 50)
    drawn = jax.vmap(lambda key: bounded_sample(policy, key))(keys)[:, 0]
    assert float(drawn.min()) == -1.0 and float(drawn.max()) == 1.0
    tail = 0.5 * math.erfc(1 / math.sqrt(2))  # P(x > 1) = 0.1587
    assert float(bounded_log_prob(policy, jnp.ones(1))) == pytest.approx(math.log(tail), rel=1e-4)
    inside = -0.5 * 0.25 - 0.5 * math.log(2 * math.pi)
    found = bounded_log_prob(policy, jnp.full(1, 0.5))
    assert float(found) == pytest.approx(inside, rel=1e-5)


def test_likelihood_is_weighted_twice_and_negated():
    policy = Categorical(jnp.log(jnp.array([[0.25, 0.75], [0.5, 0.5]])))
    nothing = jnp.zeros(2)
    weights = jnp.array([1.0, 0.5])
    batch = Batch(nothing, jnp.array([1, 0]), nothing, nothing, nothing, weights)
    plain = -(math.log(0.75) + 0.5 * math.log(0.5)) / 2
    assert float(negative_log_likelihood(policy, batch)) == pytest.approx(plain, rel=1e-6)
    found = negative_log_likelihood(policy, batch, jnp.array([2.0, 4.0]))
    assert float(found) == pytest.approx(-(2 * math.log(0.75) + 2 * math.log(0.5)) / 2, rel=1e-6)
