"""V-trace of a batch: which values it takes from the learner, and which from the actor."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.blocks.vtrace import evaluate_unroll, vtrace_of
from dovetail.envs.interface import Discrete
from dovetail.functions.normalization import Moments, normalize
from dovetail.functions.returns import Clips
from dovetail.networks.actor_critic import ActorCritic


def column(*rows: Any) -> Any:
    return jnp.array(rows)[:, None]


def batch(truncated: bool = False) -> Any:
    return SimpleNamespace(
        extras=SimpleNamespace(log_prob=column(np.log(0.5), np.log(0.25))),
        terminated=column(False, False),
        truncated=column(truncated, False),
        bootstrap=column(8.0, 99.0),
    )


def found(truncated: bool) -> Any:
    """Ratios 0.5 and 2, cut at 1; the learner's values are 1, 2 and, after the unroll, 4."""
    log_probs, values = column(np.log(0.25), np.log(0.5)), column(1.0, 2.0, 4.0)
    trace = vtrace_of(batch(truncated), column(1.0, 3.0), log_probs, values, 0.5, 1.0, Clips())
    return [np.ravel(x).tolist() for x in trace]


def test_what_follows_the_unroll_is_valued_by_the_learner() -> None:
    # δ₂ = 3 + 0.5 · 4 − 2 = 3, δ₁ = 1 + 0.5 · 2 − 1 = 1
    # v₂ − V₂ = 3, v₁ − V₁ = 0.5 · 1 + 0.5 · 0.5 · 3, A₁ = 1 + 0.5 · 3
    targets, advantages, weights = found(truncated=False)
    np.testing.assert_allclose(targets, [2.25, 5], rtol=1e-6)
    np.testing.assert_allclose(advantages, [2.5, 3], rtol=1e-6)
    np.testing.assert_allclose(weights, [0.5, 1], rtol=1e-6)


def test_a_truncated_episode_is_valued_by_the_actor() -> None:
    # δ₁ = 1 + 0.5 · 8 − 1 = 4, and nothing of the next row's
    targets, advantages, _ = found(truncated=True)
    np.testing.assert_allclose(targets, [3, 5], rtol=1e-6)
    np.testing.assert_allclose(advantages, [4, 3], rtol=1e-6)


def test_estimates_get_no_gradient() -> None:
    def total(values: jax.Array) -> jax.Array:
        log_probs = column(np.log(0.25), np.log(0.5))
        trace = vtrace_of(batch(), column(1.0, 3.0), log_probs, values, 0.5, 1.0, Clips())
        return trace.targets.sum()

    assert not np.any(jax.grad(total)(column(1.0, 2.0, 4.0)))


@pytest.mark.parametrize("enabled", [False, True])
def test_an_unroll_is_evaluated_row_by_row(enabled: bool) -> None:
    network = ActorCritic(jax.ShapeDtypeStruct((2,), jnp.float32), Discrete(2), (4,), recurrent=3)
    params = network.init(jax.random.key(0))
    rows = jax.random.normal(jax.random.key(1), (3, 1, 2))
    memory = jnp.ones((1, 1, 3))
    first = column(False, True, False)
    moments = Moments(jnp.float32(9), jnp.array([1.0, 2.0]), jnp.array([4.0, 9.0]))
    unroll: Any = SimpleNamespace(
        observation=rows[:2],
        first=first[:2],
        last=SimpleNamespace(observation=rows[2:], first=first[2:]),
        carry=SimpleNamespace(memory=memory),
    )
    distribution, values = evaluate_unroll(network, params, moments, unroll, enabled)
    carry, action = memory[0], jnp.ones((1,), jnp.int32)
    for t, row in enumerate(normalize(moments, rows) if enabled else rows):
        carry = jnp.zeros((1, 3)) if t == 1 else carry
        expected, value, carry = network.step(params, carry, row)
        np.testing.assert_allclose(values[t], value, rtol=1e-5)
        if t < 2:
            found = distribution.log_prob(jnp.ones((2, 1), jnp.int32))[t]
            np.testing.assert_allclose(found, expected.log_prob(action), rtol=1e-5)
    assert values.shape == (3, 1)
