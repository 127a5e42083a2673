import math

import jax
import jax.numpy as jnp
import pytest

from dovetail.algorithm import Task
from dovetail.blocks.exploring import check_bounded, random_action, random_log_prob
from dovetail.envs.interface import Continuous, Discrete, EnvSpec, MultiDiscrete
from dovetail.errors import UserError

KEYS = jax.random.split(jax.random.key(0), 200)


def test_a_random_action_fills_its_space():
    entries = jax.vmap(lambda key: random_action(Continuous(3, bounded=True), key))(KEYS)
    assert entries.shape == (200, 3)
    assert -1.0 <= float(entries.min()) < -0.9 and 0.9 < float(entries.max()) <= 1.0
    choices = jax.vmap(lambda key: random_action(Discrete(3), key))(KEYS)
    assert choices.dtype == jnp.int32 and set(choices.tolist()) == {0, 1, 2}


def test_its_log_probability_is_that_of_a_uniform_draw():
    assert random_log_prob(Continuous(3, bounded=True)) == pytest.approx(
        math.log(1 / 8)
    )  # a cube of side 2
    assert random_log_prob(Discrete(4)) == pytest.approx(math.log(0.25))


def test_other_spaces_have_no_random_action():
    space = MultiDiscrete((2, 3))
    with pytest.raises(NotImplementedError, match="no random action"):
        random_action(space, KEYS[0])
    with pytest.raises(NotImplementedError, match="no random action"):
        random_log_prob(space)


def test_actions_without_bounds_are_refused():
    shown = jax.ShapeDtypeStruct((2,), jnp.float32)
    check_bounded("SAC", Task(EnvSpec("toy:Bound", shown, Continuous(2, bounded=True)), 1, 10))
    free = EnvSpec("toy:Free", shown, Continuous(2, bounded=False))
    with pytest.raises(UserError, match="SAC explores within the bounds .* toy:Free"):
        check_bounded("SAC", Task(free, 1, 10))
