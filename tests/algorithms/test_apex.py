"""Ape-X: priorities on the actors' side, and actors that explore differently."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import Started

import dovetail as dt
from dovetail.algorithms import ApeX
from dovetail.algorithms.apex import ApeXExtras
from dovetail.errors import UserError
from dovetail.strategies import Fused, Local


def bound(**options: Any) -> ApeX:
    spec = dt.envs.resolve("dovetail:CartPole-v1").spec
    return ApeX(hidden_sizes=(4,), **options).bind(dt.Task(spec, num_envs=4, steps=1000))


def column(*entries: float) -> jax.Array:
    return jnp.array(entries, jnp.float32)[:, None]


def test_priorities_by_hand() -> None:
    """Two steps ahead, a discount of a half.

    t=0: 1 + ½·1 + ¼·8, the best value of t=2 being 8
    t=1: 1 + ½·1, since t=2 terminates; t=2: 1
    t=3: 1 + ½·6, since it is truncated; t=4: 1 + ½·10, since it is the last
    """
    none: Any = ()
    steps = dt.Trajectory(
        observation=none,
        action=none,
        reward=column(1, 1, 1, 1, 1),
        terminated=column(0, 0, 1, 0, 0) > 0,
        truncated=column(0, 0, 0, 1, 0) > 0,
        first=none,
        valid=none,
        next_observation=none,
        extras=ApeXExtras(column(1, 2, 3, 4, 5), column(7, 7, 8, 7, 7), log_prob=none),
        bootstrap=column(0, 0, 0, 6, 10),
        carry=none,
        last=none,
    )
    found = bound(n_step=2, gamma=0.5).priorities(steps)
    returns = np.array([1 + 0.5 + 0.25 * 8, 1 + 0.5, 1, 1 + 0.5 * 6, 1 + 0.5 * 10])
    wanted = np.abs(returns - [1, 2, 3, 4, 5]) + 1e-6
    np.testing.assert_allclose(found[:, 0], wanted, rtol=1e-5)


def test_what_is_inserted_has_the_priority_that_its_actor_gave_it() -> None:
    algorithm = ApeX(
        4,
        1,
        2,
        num_envs=4,
        hidden_sizes=(4,),
        buffer_size=64,
        learning_starts=64,
        priority_exponent=1.0,
    )
    with Started(algorithm, "dovetail:CartPole-v1", Fused()) as running:
        running.advance(1)
    given = np.asarray(running.state.replay.state.given)
    began = given[given > 0]
    assert len(began) == 16  # four steps of four environments
    assert len(set(began.tolist())) > 8
    assert not np.isclose(began, 1.0).any()  # the highest so far, if none had been given


@pytest.mark.parametrize("strategy", [Fused(), Local()], ids=["fused", "local"])
def test_some_actors_explore_and_others_hardly(strategy: Any) -> None:
    """Over a hundred steps the first acts at random in half of its choices, the last never."""

    class Watched(ApeX):
        def priorities(self, steps: Any) -> Any:
            return jnp.where(steps.extras.taken < steps.extras.best, 2.0, 1.0)

    algorithm = Watched(
        100,
        1,
        2,
        num_envs=4,
        hidden_sizes=(4,),
        buffer_size=1000,
        learning_starts=1000,
        epsilon_power=40.0,
    )
    with Started(algorithm, "dovetail:CartPole-v1", strategy) as running:
        running.advance(1)
    state = running.state.replay.state
    explored = (np.asarray(state.given).reshape(-1, 4) == 2.0).sum(axis=0)
    assert 10 <= explored[0] <= 30  # 0.4 of a hundred, half of them the best action anyway
    assert explored[1:].tolist() == [0, 0, 0]


def test_the_share_goes_by_all_environments() -> None:
    algorithm = bound(epsilon_first=0.5, epsilon_power=3.0)
    seen = dt.Timestep(jnp.zeros(4), jnp.float32(0), jnp.array(True))
    shares = [float(algorithm.epsilon(seen._replace(number=jnp.int32(i)))) for i in range(4)]
    assert shares == pytest.approx([0.5, 0.25, 0.125, 0.0625])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"epsilon_first": 2.0}, "--epsilon-first is 2.0: give 0 to 1"),
        ({"epsilon_power": -1.0}, "--epsilon-power is -1.0: give 0 or more"),
    ],
)
def test_wrong_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ApeX(**options)
