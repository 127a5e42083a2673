"""The public interpreter."""

from typing import Any

import jax
import numpy as np
import pytest

import dovetail as dt


class Looking(dt.algorithms.A2C):
    """Remembers what `act` was shown."""

    seen: list[Any] = []  # noqa: RUF012

    def act(self, params: Any, carry: Any, timestep: Any, key: Any) -> Any:
        self.seen.append(timestep.observation)
        return super().act(params, carry, timestep, key)


@pytest.mark.parametrize("env", ["dovetail:CartPole-v1", "gymnasium:CartPole-v1"])
def test_debugging_changes_nothing_and_shows_values(env: str) -> None:
    Looking.seen.clear()
    algorithm = Looking(unroll_length=2, num_envs=2, hidden_sizes=(4,))
    debugged = dt.interpret(algorithm, env, debug=True)
    assert len(Looking.seen) == 4  # two steps of two environments, one after another
    assert all(np.asarray(observation).shape == (4,) for observation in Looking.seen)
    plain = dt.interpret(algorithm, env, debug=False)
    for one, other in zip(
        jax.tree.leaves(debugged.state.params), jax.tree.leaves(plain.state.params), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert set(debugged.metrics) == set(plain.metrics)
