"""Normalization of a batch, by numbers written out."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from dovetail.blocks.normalizing import discounted_return, normalized, normalized_batch
from dovetail.functions.normalization import Moments

ALONE: Any = SimpleNamespace(mean=lambda tree: tree)
SEEN = Moments(jnp.float32(2), jnp.float32(1), jnp.float32(4))
"""Two numbers of mean 1 and deviation 2."""


def batch() -> Any:
    """Two steps that count and one that does not, of one environment."""
    return SimpleNamespace(
        observation=jnp.array([[3.0], [7.0], [99.0]]),
        reward=jnp.array([[1.0], [2.0], [99.0]]),
        valid=jnp.array([[True], [True], [False]]),
        extras=SimpleNamespace(discounted_return=jnp.array([[0.0], [4.0], [99.0]])),
    )


def prepared(observations: bool, rewards: bool) -> Any:
    return normalized_batch(
        ALONE, batch(), SEEN, SEEN, 0.5, observations=observations, rewards=rewards
    )


def test_an_observation_is_normalized_where_enabled() -> None:
    np.testing.assert_allclose(normalized(jnp.float32(5), SEEN, True), 2)
    assert normalized(jnp.float32(5), SEEN, False) == 5


def test_a_return_takes_up_the_reward() -> None:
    assert discounted_return(jnp.float32(4), jnp.float32(1), 0.5) == 3
    assert discounted_return((), jnp.float32(1), 0.5) == ()


def test_nothing_is_done_unless_enabled() -> None:
    found = prepared(observations=False, rewards=False)
    assert found.observation.tolist() == batch().observation.tolist()
    assert found.reward.tolist() == batch().reward.tolist()
    assert (found.moments, found.return_moments) == (SEEN, SEEN)


def test_observations_are_normalized_by_the_moments_before_the_batch() -> None:
    found = prepared(observations=True, rewards=False)
    np.testing.assert_allclose(found.observation[:2, 0], [1, 3])
    # -1, 3 and 3, 7: mean 3, variance (16 + 0 + 0 + 16) / 4
    np.testing.assert_allclose(found.moments, [4, 3, 8])
    assert found.return_moments == SEEN


def test_rewards_are_scaled_by_moments_that_include_the_batch() -> None:
    found = prepared(observations=False, rewards=True)
    # -1, 3 and the returns 0.5 · 0 + 1 and 0.5 · 4 + 2: mean 7 / 4, variance 27 / 4 - 49 / 16
    variance = 27 / 4 - 49 / 16
    np.testing.assert_allclose(found.return_moments, [4, 7 / 4, variance], rtol=1e-6)
    np.testing.assert_allclose(found.reward[:2, 0], np.array([1, 2]) / variance**0.5, rtol=1e-6)
    assert found.moments == SEEN


def test_replicas_share_their_sums() -> None:
    # Each of two replicas has half the sums of both: the weight is an average too.
    halved: Any = SimpleNamespace(mean=lambda sums: type(sums)(*(x / 2 for x in sums)))
    found = normalized_batch(halved, batch(), SEEN, SEEN, 0.5, observations=True, rewards=True)
    assert (found.moments.weight, found.return_moments.weight) == (3, 3)
