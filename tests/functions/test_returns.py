from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.errors import UserError
from dovetail.functions import returns


def column(*entries: float) -> jax.Array:
    """[T, 1]"""
    return jnp.array(entries, jnp.float32)[:, None]


def flags(*entries: int) -> jax.Array:
    return jnp.array(entries, bool)[:, None]


def plain(function: Callable) -> Callable:
    return function


both = pytest.mark.parametrize("wrap", [plain, jax.jit], ids=["plain", "jit"])


@both
def test_successor_values(wrap: Callable) -> None:
    found = wrap(returns.successor_values)(
        values=column(1, 2, 3, 4, 5),
        bootstrap=column(10, 20, 30, 40, 50),
        terminated=flags(0, 1, 0, 0, 0),
        truncated=flags(0, 0, 1, 0, 0),
    )
    np.testing.assert_array_equal(found[:, 0], [2, 0, 30, 5, 50])


@both
def test_termination_wins_over_truncation(wrap: Callable) -> None:
    found = wrap(returns.successor_values)(column(1, 2), column(7, 8), flags(1, 1), flags(1, 1))
    np.testing.assert_array_equal(found[:, 0], [0, 0])


@both
def test_generalized_advantages(wrap: Callable) -> None:
    # Backwards, γ = 0.5 and λ = 0.5, so γλ = 0.25:
    # t=4 goes on after the last row: 1 + 0.5·6 - 2 = 2
    # t=3:                            1 + 0.5·2 - 4 + 0.25·2 = -1.5
    # t=2 truncated, bootstraps:      1 + 0.5·8 - 2 = 3
    # t=1 terminated, does not:       3 - 1 = 2
    # t=0:                            1 + 0.5·1 - 1 + 0.25·2 = 1
    found = wrap(returns.generalized_advantages)(
        rewards=column(1, 3, 1, 1, 1),
        values=column(1, 1, 2, 4, 2),
        next_values=column(1, 99, 8, 2, 6),
        terminated=flags(0, 1, 0, 0, 0),
        truncated=flags(0, 0, 1, 0, 0),
        discount=0.5,
        lambda_=0.5,
    )
    np.testing.assert_allclose(found[:, 0], [1, 2, 3, -1.5, 2])


@both
def test_lambda_returns_are_advantages_plus_values(wrap: Callable) -> None:
    rng = np.random.default_rng(0)
    rewards, values, bootstrap = jnp.array(rng.normal(size=(3, 7, 3)), jnp.float32)
    terminated, truncated = jnp.array(rng.random((2, 7, 3)) < 0.2)
    ends = (terminated, truncated)
    next_values = returns.successor_values(values, bootstrap, *ends)
    found = wrap(returns.lambda_returns)(rewards, next_values, *ends, 0.9, 0.8)
    advantages = returns.generalized_advantages(rewards, values, next_values, *ends, 0.9, 0.8)
    np.testing.assert_allclose(found, advantages + values, atol=1e-5)


@both
def test_discounted_returns(wrap: Callable) -> None:
    # t=4: 1 + 0.5·6 = 4; t=3: 1 + 0.5·4 = 3; t=2: 1 + 0.5·8 = 5; t=1: 3; t=0: 1 + 0.5·3 = 2.5
    found = wrap(returns.discounted_returns)(
        rewards=column(1, 3, 1, 1, 1),
        next_values=column(77, 99, 8, 77, 6),
        terminated=flags(0, 1, 0, 0, 0),
        truncated=flags(0, 0, 1, 0, 0),
        discount=0.5,
    )
    np.testing.assert_allclose(found[:, 0], [2.5, 3, 5, 3, 4])


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, [1 + 0.5 * 2, 2 + 0.5 * 4, 4, 8 + 0.5 * 6, 16 + 0.5 * 8]),
        (2, [1 + 1 + 0.25 * 4, 2 + 2, 4, 8 + 8 + 0.25 * 8, 16 + 4]),
        (3, [1 + 1 + 1, 2 + 2, 4, 8 + 8 + 2, 16 + 4]),
        (50, [1 + 1 + 1, 2 + 2, 4, 8 + 8 + 2, 16 + 4]),
    ],
)
@both
def test_n_step_returns(n: int, expected: list[float], wrap: Callable) -> None:
    def function(rewards: jax.Array, next_values: jax.Array) -> jax.Array:
        ends = (flags(0, 0, 1, 0, 0), flags(0, 0, 0, 0, 0))
        return returns.n_step_returns(rewards, next_values, *ends, 0.5, n)

    found = wrap(function)(column(1, 2, 4, 8, 16), column(2, 4, 99, 6, 8))
    np.testing.assert_allclose(found[:, 0], expected)


def test_n_step_returns_of_many_steps_are_discounted_returns() -> None:
    rng = np.random.default_rng(0)
    rewards, next_values = jnp.array(rng.normal(size=(2, 6, 2)), jnp.float32)
    terminated, truncated = jnp.array(rng.random((2, 6, 2)) < 0.2)
    ends = (terminated, truncated)
    np.testing.assert_allclose(
        returns.n_step_returns(rewards, next_values, *ends, 0.9, 6),
        returns.discounted_returns(rewards, next_values, *ends, 0.9),
        atol=1e-6,
    )


@both
def test_steps_that_only_reset_change_nothing(wrap: Callable) -> None:
    """Two short episodes, without and with the reset-only rows of next-step autoreset."""
    same_step = {
        "rewards": column(1, 2, 3, 4, 5),
        "values": column(0.1, 0.2, 0.3, 0.4, 0.5),
        "bootstrap": column(0, 0, 7, 0, 9),
        "terminated": flags(0, 1, 0, 0, 0),
        "truncated": flags(0, 0, 1, 0, 0),
    }
    # Rows 2 and 4 only reset: reward 0, and values and bootstraps that must not be seen.
    valid = np.array([1, 1, 0, 1, 0, 1, 1], bool)
    next_step = {
        "rewards": column(1, 2, 0, 3, 0, 4, 5),
        "values": column(0.1, 0.2, 55, 0.3, -66, 0.4, 0.5),
        "bootstrap": column(0, 0, 77, 7, -88, 0, 9),
        "terminated": flags(0, 1, 0, 0, 0, 0, 0),
        "truncated": flags(0, 0, 0, 1, 0, 0, 0),
    }

    def estimates(
        rewards: jax.Array,
        values: jax.Array,
        bootstrap: jax.Array,
        terminated: jax.Array,
        truncated: jax.Array,
    ) -> list[jax.Array]:
        ends = (terminated, truncated)
        next_values = returns.successor_values(values, bootstrap, *ends)
        return [
            returns.generalized_advantages(rewards, values, next_values, *ends, 0.9, 0.8),
            returns.lambda_returns(rewards, next_values, *ends, 0.9, 0.8),
            returns.discounted_returns(rewards, next_values, *ends, 0.9),
            returns.n_step_returns(rewards, next_values, *ends, 0.9, 2),
        ]

    expected = wrap(estimates)(**same_step)
    found = wrap(estimates)(**next_step)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other[valid], rtol=1e-6)


def test_different_shapes_are_refused() -> None:
    with pytest.raises(UserError, match=r"values \[2, 1\], bootstrap \[3, 1\]"):
        returns.successor_values(column(1, 2), column(1, 2, 3), flags(0, 0), flags(0, 0))


def test_a_missing_batch_axis_is_refused() -> None:
    with pytest.raises(UserError, match=r"one shape \[T, B\], but were given values \[2\]"):
        returns.successor_values(*[jnp.ones(2)] * 4)


def test_no_steps_are_refused() -> None:
    with pytest.raises(UserError, match="n is 0"):
        returns.n_step_returns(column(1), column(1), flags(0), flags(0), 0.9, 0)
