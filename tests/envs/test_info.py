"""Numbers of the environments' `info`, whoever steps them."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from informing import LENGTH, Informing
from numpy.testing import assert_array_equal

from dovetail.envs.info import with_info
from dovetail.envs.info_values import table
from dovetail.envs.interface import HostStep
from dovetail.envs.resolve import Env, resolve

NAN = np.nan


def test_values_are_read_where_their_mask_is_set() -> None:
    infos = {"x": np.array([1.0, 2.0]), "_x": np.array([True, False]), "name": ["a", "b"]}
    assert_array_equal(table(infos, ["x", "name", "y"], 2), [[1, NAN, NAN], [NAN, NAN, NAN]])
    assert_array_equal(table({"x": [3, 4]}, ["x"], 2), [[3], [4]])  # EnvPool has no masks


@pytest.mark.parametrize("listed", [False, True])
def test_the_info_of_an_ended_episode_comes_before_that_of_its_reset(listed: bool) -> None:
    of_last: Any = {"x": np.array([0, 9]), "_x": np.array([False, True])}
    final = np.array([None, {"x": 9, "name": "text"}]) if listed else of_last
    infos = {"x": np.array([1, 2]), "_x": np.array([True, True]), "final_info": final}
    assert_array_equal(table(infos, ["x"], 2), [[1], [9]])


def episode(env: Env, num_envs: int, **more: Any) -> np.ndarray:
    """The logged values of environment 0 in its first episode."""
    make = env.process if more else env.host
    assert make is not None
    batch = make(num_envs, **more)
    batch.reset(list(range(num_envs)))
    seen = [batch.step(np.zeros(num_envs, np.int32)).info[0].copy() for _ in range(LENGTH)]
    assert batch.spec.info == ("time", "success", "name")
    batch.close()
    return np.array(seen)


@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("apart", [{}, {"patience": 30.0}], ids=["here", "process"])
def test_a_gymnasium_environment_reports_them(num_envs: int, apart: dict[str, Any]) -> None:
    env = with_info(resolve(Informing), ("time", "success", "name"))
    wanted = [[t + 1, 1 if t + 1 == LENGTH else NAN, NAN] for t in range(LENGTH)]
    assert_array_equal(episode(env, num_envs, **apart), wanted)


def test_without_keys_nothing_changes() -> None:
    env = resolve(Informing)
    assert with_info(env, ()) is env and env.spec.info == ()


class Own:
    """A `HostEnv` of a user, which reports arrays by name."""

    def __init__(self, num_envs: int) -> None:
        self.spec, self.num_envs = resolve(Informing).spec, num_envs

    def reset(self, seeds: list[int]) -> Any:
        return np.zeros((self.num_envs, 2), np.float32)

    def step(self, action: np.ndarray) -> HostStep:
        seen, no = np.zeros((self.num_envs, 2), np.float32), np.zeros(self.num_envs, np.bool_)
        reward = np.zeros(self.num_envs, np.float32)
        info = {"x": np.arange(self.num_envs)}
        return HostStep(seen, seen, reward, no, no, no, ~no, info)

    def close(self) -> None: ...


def test_a_host_environment_of_your_own_reports_arrays_by_name() -> None:
    plain = Env(resolve(Informing).spec, None, partial(Own))
    made = with_info(plain, ("x", "y")).host
    assert made is not None
    assert_array_equal(made(2).step(np.zeros(2)).info, [[0, NAN], [1, NAN]])
