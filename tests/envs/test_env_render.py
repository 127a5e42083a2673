"""One environment to watch, for every back end that has a picture."""

import numpy as np
import pytest

from dovetail.envs import resolve
from dovetail.envs.render import render_env


@pytest.mark.parametrize(
    "env", ["CartPole-v1", "dovetail:CartPole-v1?limit=5", "gymnax:CartPole-v1", "ale:pong"]
)
def test_it_draws_and_shows_what_the_algorithm_sees(env):
    resolved = resolve(env)
    watched = render_env(resolved)
    assert watched is not None
    observation, _ = watched.reset(seed=0)
    assert observation.shape == resolved.spec.observation.shape
    assert observation.dtype == resolved.spec.observation.dtype
    watched.step(np.int32(1))
    frame = watched.render()
    assert isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.shape[2] == 3
    watched.close()


def test_actions_are_rescaled_as_in_training():
    watched = render_env(resolve("Pendulum-v1"))
    assert watched is not None
    watched.reset(seed=0)
    watched.step(np.array([0.5], np.float32))
    assert watched.get_wrapper_attr("last_u") == 1.0
    watched.close()


@pytest.mark.parametrize("env", ["dovetail:MemoryCue-v0", "gymnax:Breakout-MinAtar"])
def test_what_has_no_picture_is_none(env):
    assert render_env(resolve(env)) is None
