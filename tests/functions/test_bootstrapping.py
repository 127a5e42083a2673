"""Targets from windows of replayed steps, against written numbers."""

import jax.numpy as jnp
import numpy as np

from dovetail.functions.bootstrapping import chosen, n_step, row

MASK = jnp.array([[1, 1, 0], [1, 1, 0], [1, 0, 0]], bool)
REWARDS = jnp.array([[1.0, 2.0, 9.0], [1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
TERMINATED = jnp.array([[0, 0, 1], [0, 1, 0], [0, 0, 0]], bool)


def test_rewards_are_summed_and_what_follows_counts_less() -> None:
    found = n_step(REWARDS, TERMINATED, MASK, 0.5)
    np.testing.assert_allclose(found.reward, [2.0, 2.0, 4.0])
    np.testing.assert_allclose(found.discount, [0.25, 0.0, 0.5])  # the second terminated
    assert found.last.tolist() == [2, 2, 1]


def test_the_row_behind_the_last_step() -> None:
    rows = {"a": jnp.arange(9).reshape(3, 3), "b": jnp.arange(18).reshape(3, 3, 2)}
    found = row(rows, jnp.array([2, 2, 1]))
    assert found["a"].tolist() == [2, 5, 7]
    assert found["b"].tolist() == [[4, 5], [10, 11], [14, 15]]


def test_the_outputs_of_an_action() -> None:
    outputs = jnp.arange(12).reshape(2, 3, 2)
    assert chosen(outputs, jnp.array([2, 0])).tolist() == [[4, 5], [6, 7]]
