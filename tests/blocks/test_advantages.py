"""Advantages of an unroll, by numbers written out."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from dovetail.blocks.actor_critic import advantages_and_targets, first_row


def column(*rows: Any) -> Any:
    return jnp.array(rows)[:, None]


def unroll(**ends: Any) -> Any:
    """Two steps whose values were 1 and 2; the value after them is 4."""
    ends = {"terminated": column(False, False), "truncated": column(False, False), **ends}
    return SimpleNamespace(
        extras=SimpleNamespace(value=column(1.0, 2.0)), bootstrap=column(8.0, 4.0), **ends
    )


def found(batch: Any) -> Any:
    pair = advantages_and_targets(batch, column(1.0, 3.0), discount=0.5, lambda_=0.5)
    return [np.ravel(x).tolist() for x in pair]


def test_an_episode_that_goes_on() -> None:
    # δ₂ = 3 + 0.5 · 4 − 2 = 3, δ₁ = 1 + 0.5 · 2 − 1 = 1, A₁ = 1 + 0.25 · 3
    assert found(unroll()) == [[1.75, 3.0], [2.75, 5.0]]


def test_nothing_follows_the_end_of_an_episode() -> None:
    # A₁ = 1 + 0 − 1
    assert found(unroll(terminated=column(True, False))) == [[0.0, 3.0], [1.0, 5.0]]


def test_a_truncated_episode_goes_on_at_its_bootstrap() -> None:
    # A₁ = 1 + 0.5 · 8 − 1, and nothing of the next row's
    assert found(unroll(truncated=column(True, False))) == [[4.0, 3.0], [5.0, 5.0]]


def test_the_first_row() -> None:
    assert first_row({"memory": jnp.array([[1, 2], [3, 4]])})["memory"].tolist() == [1, 2]
    assert first_row(()) == ()
