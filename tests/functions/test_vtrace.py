from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import UserError
from dovetail.functions import returns
from dovetail.functions.returns import Clips, VTrace


def column(*entries: float) -> jax.Array:
    """[T, 1]"""
    return jnp.array(entries, jnp.float32)[:, None]


def flags(*entries: int) -> jax.Array:
    return jnp.array(entries, bool)[:, None]


def plain(function: Callable) -> Callable:
    return function


both = pytest.mark.parametrize("wrap", [plain, jax.jit], ids=["plain", "jit"])


def assert_columns(found: VTrace, **expected: list[float]) -> None:
    for name, numbers in expected.items():
        np.testing.assert_allclose(getattr(found, name)[:, 0], numbers, rtol=1e-6, err_msg=name)


@both
def test_on_policy_the_targets_are_returns(wrap: Callable) -> None:
    # Backwards, γ = 0.5:
    # t=4 goes on after the last row: 1 + 0.5·6 = 4
    # t=3:                            1 + 0.5·4 = 3
    # t=2 truncated, bootstraps:      1 + 0.5·8 = 5
    # t=1 terminated, does not:       3
    # t=0:                            1 + 0.5·3 = 2.5
    found = wrap(returns.vtrace)(
        log_ratios=column(0, 0, 0, 0, 0),
        rewards=column(1, 3, 1, 1, 1),
        values=column(1, 1, 2, 4, 2),
        next_values=column(1, 99, 8, 2, 6),
        terminated=flags(0, 1, 0, 0, 0),
        truncated=flags(0, 0, 1, 0, 0),
        discount=0.5,
        lambda_=1.0,
        clips=Clips(),
    )
    assert_columns(
        found, targets=[2.5, 3, 5, 3, 4], advantages=[1.5, 2, 3, -1, 2], weights=[1, 1, 1, 1, 1]
    )


def clipped(lambda_: float) -> VTrace:
    """Three steps of an episode that goes on, each with r + γ V(x') - V(x) = 1 for γ = 0.5."""
    return returns.vtrace(
        log_ratios=jnp.log(column(4, 0.5, 2)),
        rewards=column(1, 2, 3),
        values=column(2, 4, 6),
        next_values=column(4, 6, 8),
        terminated=flags(0, 0, 0),
        truncated=flags(0, 0, 0),
        discount=0.5,
        lambda_=lambda_,
        clips=Clips(rho=3.0, c=1.0, gradient=2.5),
    )


def test_ratios_are_clipped() -> None:
    # ρ = 3, 0.5, 2 and c = 1, 0.5, 1. Of v - V, backwards:
    # t=2: 2·1 = 2;  t=1: 0.5·1 + 0.5·0.5·2 = 1;  t=0: 3·1 + 0.5·1·1 = 3.5
    # Advantages: t=2: 3 + 0.5·8 - 6;  t=1: 2 + 0.5·8 - 4;  t=0: 1 + 0.5·5 - 2
    assert_columns(
        clipped(lambda_=1.0), targets=[5.5, 5, 8], advantages=[1.5, 2, 1], weights=[2.5, 0.5, 2]
    )


def test_lambda_shortens_the_trace() -> None:
    # t=2: 2;  t=1: 0.5 + 0.5·(0.5·0.5)·2 = 0.75;  t=0: 3 + 0.5·(0.5·1)·0.75 = 3.1875
    # Advantages: t=2: 1;  t=1: 1 + 0.5·0.5·2;  t=0: 1 + 0.5·0.5·0.75
    assert_columns(clipped(lambda_=0.5), targets=[5.1875, 4.75, 8], advantages=[1.1875, 1.5, 1])


@both
def test_nothing_passes_the_end_of_an_episode(wrap: Callable) -> None:
    # Ratios of 2, cut at 1. t=2 is another episode, worth 100 more than thought.
    for ends in [(flags(0, 1, 0), flags(0, 0, 0)), (flags(0, 0, 0), flags(0, 1, 0))]:
        found = wrap(returns.vtrace)(
            jnp.log(column(2, 2, 2)),
            column(1, 1, 100),
            column(1, 1, 0),
            column(1, 4, 0),
            *ends,
            0.5,
            1.0,
            Clips(),
        )
        beyond = 0.5 * 4 * float(ends[1][1, 0])
        assert_columns(found, targets=[1 + 0.5 * (1 + beyond), 1 + beyond, 100])
        assert_columns(found, advantages=[0.5 * (1 + beyond), beyond, 100])


def test_a_ratio_beyond_what_a_float_holds_is_clipped() -> None:
    column_of_one = (column(1), column(1), column(1), flags(0), flags(0))
    found = returns.vtrace(column(500), *column_of_one, 0.5, 1.0, Clips())
    assert_columns(found, targets=[1.5], advantages=[0.5], weights=[1])


def slow_vtrace(
    ratios: np.ndarray, rewards: np.ndarray, values: np.ndarray, next_values: np.ndarray,
    terminated: np.ndarray, truncated: np.ndarray, discount: float, lambda_: float, clips: Clips,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """One environment [T], as the paper has it: for each s a sum over t of products over i."""
    length = len(rewards)
    beyond = np.where(terminated, 0.0, next_values)
    delta = np.minimum(clips.rho, ratios) * (rewards + discount * beyond - values)
    c = lambda_ * np.minimum(clips.c, ratios)
    ends = [t for t in range(length) if terminated[t] or truncated[t] or t == length - 1]
    targets = values.copy()
    for s in range(length):
        end = next(t for t in ends if t >= s)
        for t in range(s, end + 1):
            targets[s] += discount ** (t - s) * np.prod(c[s:t]) * delta[t]
    ahead = np.array(
        [
            beyond[s] if s in ends else lambda_ * targets[s + 1] + (1 - lambda_) * values[s + 1]
            for s in range(length)
        ]
    )
    return targets, rewards + discount * ahead - values


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    lambda_=st.sampled_from([0.0, 0.7, 1.0]),
    rho=st.sampled_from([0.5, 1.0, 3.0]),
    c=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_the_recursion_is_the_papers_sum(seed: int, lambda_: float, rho: float, c: float) -> None:
    rng = np.random.default_rng(seed)
    ratios = np.exp(rng.normal(size=(9, 2)))
    rewards, values, bootstrap = rng.normal(size=(3, 9, 2))
    terminated, truncated = rng.random((2, 9, 2)) < 0.15
    next_values = np.where(truncated, bootstrap, np.concatenate([values[1:], bootstrap[-1:]]))
    arrays = (rewards, values, next_values, terminated, truncated)
    clips = Clips(rho, c)
    found = returns.vtrace(
        *map(jnp.asarray, (np.log(ratios), *arrays)), discount=0.9, lambda_=lambda_, clips=clips
    )
    for i in range(2):
        targets, advantages = slow_vtrace(
            ratios[:, i],
            *(array[:, i] for array in arrays),
            discount=0.9,
            lambda_=lambda_,
            clips=clips,
        )
        np.testing.assert_allclose(found.targets[:, i], targets, atol=1e-4)
        np.testing.assert_allclose(found.advantages[:, i], advantages, atol=1e-4)
    np.testing.assert_allclose(found.weights, np.minimum(ratios, 1.0), rtol=1e-5)


@both
def test_on_policy_the_advantages_are_generalized_ones(wrap: Callable) -> None:
    rng = np.random.default_rng(0)
    rewards, values, bootstrap = jnp.array(rng.normal(size=(3, 7, 3)), jnp.float32)
    terminated, truncated = jnp.array(rng.random((2, 7, 3)) < 0.2)
    ends = (terminated, truncated)
    next_values = returns.successor_values(values, bootstrap, *ends)
    arrays = (rewards, values, next_values, *ends)
    found = wrap(returns.vtrace)(jnp.zeros((7, 3)), *arrays, 0.9, 0.8, Clips())
    expected = returns.generalized_advantages(*arrays, discount=0.9, lambda_=0.8)
    np.testing.assert_allclose(found.advantages, expected, atol=1e-5)
    np.testing.assert_allclose(found.targets, expected + values, atol=1e-5)


def test_steps_that_only_reset_change_nothing() -> None:
    def trace(ratios: jax.Array, rewards: jax.Array, values: jax.Array, *rest: jax.Array) -> VTrace:
        clips = Clips(1.5, 1.2)
        return returns.vtrace(
            jnp.log(ratios), rewards, values, *rest, discount=0.9, lambda_=0.8, clips=clips
        )

    expected = trace(
        column(2, 0.5, 0.3, 1.1),
        column(1, 2, 3, 4),
        column(0.1, 0.2, 0.3, 0.4),
        column(0.2, 0, 0.4, 9),
        flags(0, 1, 0, 0),
        flags(0, 0, 0, 0),
    )
    found = trace(  # row 2 only resets
        column(2, 0.5, 7, 0.3, 1.1),
        column(1, 2, 0, 3, 4),
        column(0.1, 0.2, 55, 0.3, 0.4),
        column(0.2, 55, 0.3, 0.4, 9),
        flags(0, 1, 0, 0, 0),
        flags(0, 0, 0, 0, 0),
    )
    kept = np.array([0, 1, 3, 4])
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other[kept], rtol=1e-6)


def test_different_shapes_are_refused() -> None:
    with pytest.raises(UserError, match=r"log_ratios \[1, 1\], rewards \[2, 1\]"):
        two, going_on = column(1, 2), flags(0, 0)
        returns.vtrace(column(0), two, two, two, going_on, going_on, 0.9, 1.0, Clips())
