"""Retrace(λ), against written numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.errors import UserError
from dovetail.functions.returns import lambda_returns, retrace


def column(*entries: float) -> jax.Array:
    return jnp.array(entries, jnp.float32)[:, None]


def flags(*entries: int) -> jax.Array:
    return jnp.array(entries, bool)[:, None]


STEPS: dict[str, Any] = {
    "rewards": column(1, 2, 3, 4),
    "values": column(1, 2, 3, 4),
    "next_values": column(4, 6, 8, 10),
    "terminated": flags(0, 0, 0, 1),
    "truncated": flags(0, 0, 0, 0),
    "discount": 0.5,
}


@pytest.mark.parametrize("function", [retrace, jax.jit(retrace)], ids=["plain", "jit"])
def test_traces_are_cut_where_the_policy_would_not_have_acted_so(function: Any) -> None:
    # errors: 1 + 2 - 1 = 2; 2 + 3 - 2 = 3; 3 + 4 - 3 = 4; 4 - 4 = 0 (terminated)
    # traces, λ = 0.8: of steps 1 … 3 min(1, 0.5), min(1, 2), min(1, 1) times λ: 0.4, 0.8, 0.8
    # t=3: 0;  t=2: 4 + 0.5·0.8·0 = 4;  t=1: 3 + 0.5·0.8·4 = 4.6;  t=0: 2 + 0.5·0.4·4.6 = 2.92
    ratios = jnp.log(column(9.0, 0.5, 2.0, 1.0))
    found = function(ratios, **STEPS, lambda_=0.8)
    np.testing.assert_allclose(found[:, 0], [3.92, 6.6, 7.0, 4.0], rtol=1e-6)


def test_nothing_passes_the_end_of_an_episode() -> None:
    cut: dict[str, Any] = {**STEPS, "truncated": flags(0, 1, 0, 0)}
    found = retrace(jnp.zeros((4, 1)), **cut, lambda_=1.0)
    # t=1 bootstraps: 2 + 0.5·6 = 5; t=0: 1 + 0.5·4 + 0.5·(5 - 2) = 4.5
    np.testing.assert_allclose(found[:2, 0], [4.5, 5.0], rtol=1e-6)


def test_where_the_policy_acted_itself_it_is_the_return() -> None:
    """With values that are their policy's own expectations, it is TD(λ)."""
    values = column(1, 2, 3, 4)
    following = jnp.concatenate([values[1:], column(7)])
    ends = flags(0, 0, 0, 0), flags(0, 0, 0, 0)
    found = retrace(jnp.zeros((4, 1)), STEPS["rewards"], values, following, *ends, 0.9, 0.7)
    wanted = lambda_returns(STEPS["rewards"], following, *ends, 0.9, 0.7)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_shapes_are_checked() -> None:
    with pytest.raises(UserError, match="one shape"):
        retrace(jnp.zeros((3, 1)), **STEPS, lambda_=1.0)
