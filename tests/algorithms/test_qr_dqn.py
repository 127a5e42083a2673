"""QR-DQN: quantiles in place of values."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dovetail as dt
from dovetail.algorithms import QRDQN
from dovetail.errors import UserError


def bound(**options: Any) -> QRDQN:
    spec = dt.envs.resolve("dovetail:CartPole-v1").spec
    return QRDQN(hidden_sizes=(4,), **options).bind(dt.Task(spec, num_envs=2, steps=1000))


def test_quantiles_are_compared_with_those_of_where_it_led() -> None:
    algorithm = bound(quantiles=2)
    taken, following = jnp.array([[1.0, 4.0]]), jnp.array([[4.0, -2.0]])
    losses, errors = algorithm.td_loss(taken, jnp.array([1.0]), jnp.array([0.5]), following)
    # the goals are 1 + 2 and 1 - 1; the loss is that of tests/functions
    np.testing.assert_allclose(losses, [0.375 + 0.5], rtol=1e-6)
    np.testing.assert_allclose(errors, [2.5 - 1.5], rtol=1e-6)
    np.testing.assert_allclose(algorithm.values(taken), [2.5])


def test_after_a_termination_the_reward_is_all() -> None:
    algorithm = bound(quantiles=2)
    same = jnp.array([[3.0, 3.0]])
    losses, errors = algorithm.td_loss(same, jnp.array([3.0]), jnp.array([0.0]), 9 * same)
    assert losses.tolist() == [0.0] == errors.tolist()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"quantiles": 0}, "--quantiles is 0: give 1 or more"),
        ({"huber": 0.0}, "--huber is 0.0: give more than 0"),
        ({"epsilon_start": -0.1}, "--epsilon-start is -0.1: give 0 to 1"),
    ],
)
def test_wrong_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        QRDQN(**options)
