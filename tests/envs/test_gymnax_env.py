"""Gymnax behind our interface: true ends, true final observations, every environment."""

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.envs import check_jax_env, resolve
from dovetail.envs.interface import Continuous, Discrete
from dovetail.errors import UserError

KEY = jax.random.key(0)


@pytest.mark.parametrize("name", ["Pendulum-v1", "FourRooms-misc"])
def test_it_conforms(name):
    check_jax_env(resolve(f"gymnax:{name}").jax, steps=30)


def test_specs_and_thresholds():
    cartpole, pendulum = resolve("gymnax:CartPole-v1").spec, resolve("gymnax:Pendulum-v1").spec
    assert (cartpole.action, cartpole.threshold) == (Discrete(2), 475)
    assert (pendulum.action, pendulum.threshold) == (Continuous(1, True), -200)
    breakout = resolve("gymnax:Breakout-MinAtar").spec
    assert breakout.threshold is None and breakout.observation.shape == (10, 10, 4)


def test_pendulum_steps_like_gymnasiums():
    reference: Any = gymnasium.make("Pendulum-v1").unwrapped
    env = resolve("gymnax:Pendulum-v1").jax
    step = jax.jit(env.step)
    state, _ = env.reset(KEY)
    reference.reset(seed=0)
    reference.state = np.array([state.theta, state.theta_dot], np.float64)
    for action in np.linspace(-1.5, 1.5, 30, dtype=np.float32):
        torque = np.clip(2 * action, -2, 2)
        expected, reward, *_ = reference.step(np.array([torque]))
        after = step(state, jnp.array([action]), KEY)
        np.testing.assert_allclose(after.observation, expected, atol=2e-4)
        np.testing.assert_allclose(after.reward, reward, atol=2e-3)
        state = after.state


def test_a_time_limit_truncates_with_the_true_final_observation():
    env = resolve("gymnax:CartPole-v1?max_steps_in_episode=5").jax
    state, _ = env.reset(KEY)
    flags = []
    for t in range(5):
        before = state
        after = env.step(state, jnp.int32(t % 2), KEY)
        state = after.state
        flags.append((bool(after.terminated), bool(after.truncated)))
    assert flags == [(False, False)] * 4 + [(False, True)]
    expected = resolve("dovetail:CartPole-v1").jax
    physics = jnp.stack([before.x, before.x_dot, before.theta, before.theta_dot])
    start = expected.reset(KEY)[0]._replace(physics=physics)
    led_to = expected.step(start, jnp.int32(0), KEY).observation
    np.testing.assert_allclose(after.observation, led_to, rtol=1e-5)


def test_falling_terminates():
    env = resolve("gymnax:CartPole-v1").jax
    step = jax.jit(env.step)
    state, _ = env.reset(KEY)
    for _ in range(30):
        after = step(state, jnp.int32(1), KEY)
        state = after.state
        if after.terminated:
            break
    assert after.terminated and not after.truncated


def test_discrete_observations_are_one_hots():
    env = resolve("gymnax:FrozenLake-misc").jax
    _, observation = env.reset(KEY)
    assert observation.shape == (16,) and float(observation.sum()) == 1


def test_an_unknown_option_is_a_sentence():
    with pytest.raises(UserError, match="no option 'gravty': did you mean 'gravity'"):
        resolve("gymnax:CartPole-v1?gravty=3")
