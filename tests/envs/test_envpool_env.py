"""EnvPool behind our interface; runs where the extra is installed."""

import numpy as np
import pytest

pytest.importorskip("envpool")

from dovetail.envs import Continuous, check_host_env, resolve
from dovetail.envs.native import CartPole, CartPoleState
from dovetail.errors import UserError


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Pong-v5"])
def test_it_conforms(env):
    check_host_env(resolve(f"envpool:{env}?max_episode_steps=9").host, steps=25)


def test_specs_and_thresholds():
    assert resolve("envpool:CartPole-v1").spec.threshold == 475
    assert resolve("envpool:Pendulum-v1").spec.action == Continuous(1, True)
    assert resolve("envpool:Pong-v5").spec.observation.shape == (4, 84, 84)


def test_a_time_limit_delivers_the_true_final_observation():
    import jax
    import jax.numpy as jnp

    factory = resolve("envpool:CartPole-v1?max_episode_steps=6").host
    assert factory is not None
    batch = factory(2)
    observation = batch.reset([3, 4])
    state = CartPoleState(jnp.asarray(observation[1]), jnp.int32(0))
    for t in range(6):
        step = batch.step(np.full(2, t % 2, np.int32))
        after = CartPole().step(state, jnp.int32(t % 2), jax.random.key(0))
        np.testing.assert_allclose(step.next_observation[1], after.observation, atol=1e-5)
        state = after.state
    assert step.truncated.all() and not step.first.any()
    step = batch.step(np.zeros(2, np.int32))
    assert step.first.all() and not step.valid.any() and np.abs(step.observation).max() <= 0.05
    batch.close()


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ("envpool:CartPol-v1", "did you mean 'CartPole-v"),
        ("envpool:CartPole-v1?autoreset=same_step", "autoreset=same_step"),
        ("envpool:CartPole-v1?batch_size=2", "Dovetail sets it"),
        ("envpool:CartPole-v1?color=2", "could not be made"),
    ],
)
def test_mistakes_are_sentences(env, sentence):
    with pytest.raises(UserError, match=sentence):
        resolve(env)


def test_stepping_before_a_reset_is_refused():
    factory = resolve("envpool:CartPole-v1").host
    assert factory is not None
    with pytest.raises(UserError, match="stepped before it was reset"):
        factory(1).step(np.zeros(1, np.int32))
