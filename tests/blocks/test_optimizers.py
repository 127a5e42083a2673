"""Clipped Adam and its annealed step size."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dovetail.blocks.optimizers import adam_with_clipping, annealed, apply_gradients, updates_in


def test_the_rate_falls_linearly_to_nothing() -> None:
    rate: Any = annealed(0.4, 4)
    np.testing.assert_allclose([float(rate(step)) for step in (0, 2, 4, 9)], [0.4, 0.2, 0, 0])
    assert annealed(0.4, 0)(1) == 0  # a task of no steps


@pytest.mark.parametrize(("steps", "updates"), [(64, 2), (65, 3), (1, 1)])
def test_a_partial_update_counts(steps: int, updates: int) -> None:
    task: Any = SimpleNamespace(steps=steps, num_envs=4)
    assert updates_in(task, 8) == updates


def test_a_step_goes_down_along_clipped_gradients() -> None:
    params, optimizer = jnp.array([1.0, 1.0]), adam_with_clipping(0.1, 0.5)
    gradients = jnp.array([3.0, -4.0])  # of norm 5, clipped to [0.3, -0.4]
    params, state = apply_gradients(optimizer, gradients, optimizer.init(params), params)
    np.testing.assert_allclose(params, [0.9, 1.1], rtol=1e-4)  # Adam's first step is its rate
    np.testing.assert_allclose(optax.tree.get(state, "mu"), [0.03, -0.04], rtol=1e-5)
