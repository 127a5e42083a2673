"""Wrappers: their names and arguments, around Gymnasium's environments and around JAX's."""

from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text

from dovetail.envs import check_host_env, check_jax_env, resolve
from dovetail.envs.frames import FrameStack
from dovetail.envs.interface import Continuous
from dovetail.envs.wrapping import files_of, objects_of, parse_wraps, relocated, with_wraps
from dovetail.errors import UserError
from dovetail.loading import keep, load_object, reference

OWN = """
import gymnasium


class Scaled(gymnasium.ObservationWrapper):
    def __init__(self, env, factor=2.0):
        super().__init__(env)
        self.factor = factor

    def observation(self, observation):
        return observation * self.factor


class Fails(gymnasium.Wrapper):
    def __init__(self, env):
        raise ValueError("no")


def nothing(env):
    return None
"""


class Mission(gymnasium.Env[Any, Any]):
    """Shows a number and a text, as MiniGrid does."""

    observation_space = Dict({"number": Box(-1, 1, (3,), np.float32), "mission": Text(9)})
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._shown(), {}

    def step(self, action: Any) -> Any:
        return self._shown(), 7.0, False, False, {}

    def _shown(self) -> Any:
        return {"number": np.full(3, 0.5, np.float32), "mission": "go"}


class Number(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows the number only."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = env.observation_space["number"]

    def observation(self, observation: Any) -> Any:
        return observation["number"]


class Pixels(gymnasium.Env[Any, Any]):
    """Counts its steps in an image, always the same array."""

    action_space = Discrete(2)

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.observation_space = Box(0, 255, shape, np.uint8)
        self._image = np.zeros(shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._image[:] = 1
        return self._image, {}

    def step(self, action: Any) -> Any:
        self._image += 1
        return self._image, 0.0, False, False, {}


@pytest.fixture
def own(tmp_path: Path) -> str:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return str(file)


def test_names_and_arguments(own: str) -> None:
    text = f"frame-stack:4,ResizeObservation:[84,96],NormalizeReward:gamma=0.9,{own}:Scaled:3"
    stack, resize, reward, mine = parse_wraps(text)
    assert (stack.name, stack.args) == ("frame-stack", (4,))
    assert (resize.name, resize.args) == ("ResizeObservation", ((84, 96),))
    assert (reward.make, reward.kwargs) == ("gymnasium.wrappers:NormalizeReward", (("gamma", 0.9),))
    assert (mine.name, mine.args) == (f"{own}:Scaled", (3,))


def test_wrappers_are_part_of_the_environment() -> None:
    env = resolve("CartPole-v1?wrap=time-limit:3,frame-stack:2,ClipReward:0:0.25")
    assert env.spec.id == "gymnasium:CartPole-v1?wrap=time-limit:3,frame-stack:2,ClipReward:0:0.25"
    assert env.spec.observation.shape == (8,) and env.spec.threshold is None
    assert env.host is not None and env.single is not None
    host = env.host(2)
    start = host.reset([0, 1])
    np.testing.assert_array_equal(start[:, :4], start[:, 4:])
    for number in range(3):
        step = host.step(np.zeros(2, np.int32))
        np.testing.assert_array_equal(step.reward, [0.25, 0.25])
        # A limit truncates; it does not terminate.
        assert step.truncated.all() == (number == 2) and not step.terminated.any()
    host.close()
    shown = env.single()
    assert shown.observation_space.shape == (8,)
    shown.close()


def test_wrapped_environments_conform(own: str) -> None:
    check_host_env(resolve(f"CartPole-v1?wrap={own}:Scaled:0.5,frame-stack:3").host, steps=30)
    check_jax_env(
        resolve("dovetail:CartPole-v1?wrap=frame-stack:3,clip-reward,time-limit:9,flatten").jax,  # type: ignore[arg-type]
        steps=30,
    )


@pytest.mark.slow
def test_processes_apply_wrappers_from_files(own: str) -> None:
    env = resolve(f"CartPole-v1?vectorization=processes&processes=1&wrap={own}:Scaled:3")
    plain = resolve("CartPole-v1")
    assert env.host is not None and plain.host is not None
    ours, theirs = env.host(2), plain.host(2)
    np.testing.assert_allclose(ours.reset([3, 4]), 3 * theirs.reset([3, 4]), rtol=1e-6)
    ours.close()
    theirs.close()


def test_a_text_needs_a_wrapper() -> None:
    with pytest.raises(UserError, match=r"'mission' of the space Text, .* \(--wrap\) so that"):
        resolve(Mission)
    env = resolve(with_wraps(Mission, [Number, lambda env: env, "clip-reward"]))
    assert env.spec.id.startswith("python:Mission?wrap=") and env.spec.observation.shape == (3,)
    assert env.host is not None
    host = env.host(1)
    host.reset([0])
    assert host.step(np.zeros(1, np.int32)).reward == 1
    host.close()


@pytest.mark.parametrize(
    ("shape", "joined", "newest"),
    [
        ((5, 6), (3, 5, 6), np.s_[-1:]),
        ((5, 6, 2), (5, 6, 6), np.s_[..., -2:]),
        ((2, 5, 6), (6, 5, 6), np.s_[-2:]),
        ((4,), (12,), np.s_[-4:]),
    ],
)
def test_frames_are_joined_along_the_channels(
    shape: tuple[int, ...], joined: tuple[int, ...], newest: Any
) -> None:
    env = FrameStack(Pixels(shape), 3)
    first, _ = env.reset()
    assert first.shape == joined == env.observation_space.shape and (first == 1).all()
    env.step(0)
    last = env.step(0)[0]
    assert (last[newest] == 3).all() and sorted(set(last.ravel())) == [1, 2, 3]


def test_frames_of_a_dict_are_joined_one_by_one() -> None:
    with pytest.raises(UserError, match="joins Box observations, and this one is Text"):
        FrameStack(Mission(), 2)
    space = Dict({"a": Box(0, 1, (2,)), "b": Box(0, 255, (4, 4), np.uint8)})
    two = gymnasium.wrappers.TransformObservation(Pixels((4,)), lambda o: space.sample(), space)
    shown, _ = FrameStack(two, 2).reset(seed=0)
    assert shown["a"].shape == (4,) and shown["b"].shape == (2, 4, 4)


def test_jax_wrappers_agree_with_gymnasiums() -> None:
    traced = resolve("dovetail:CartPole-v1?wrap=time-limit:2,frame-stack:2").jax
    assert traced is not None and traced.spec.observation.shape == (8,)
    state, first = traced.reset(jax.random.key(0))
    np.testing.assert_array_equal(first[:4], first[4:])
    for ends in (False, True):
        before = first
        after = traced.step(state, jnp.int32(1), jax.random.key(1))
        state, first = after.state, after.observation
        np.testing.assert_array_equal(first[:4], before[4:])
        assert bool(after.truncated) is ends and not after.terminated and after.reward == 1
    clipped = resolve("gymnax:Pendulum-v1?wrap=clip-reward:-0.5:0.5").jax
    assert clipped is not None and isinstance(clipped.spec.action, Continuous)
    state, _ = clipped.reset(jax.random.key(0))
    assert abs(float(clipped.step(state, jnp.ones(1), jax.random.key(0)).reward)) <= 0.5


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ("CartPole-v1?wrap=frame-stak:4", "There is no wrapper 'frame-stak': did you mean 'frame-"),
        ("CartPole-v1?wrap=TimeLimt:4", "no wrapper 'TimeLimt': did you mean 'TimeLimit'"),
        ("CartPole-v1?wrap=xyzzy", "choose one of: clip-reward, .* one of Gymnasium's"),
        ("CartPole-v1?wrap=gray,", "have an empty name"),
        ("CartPole-v1?wrap=gray", "'gray' does not fit gymnasium:CartPole-v1 .*AssertionError"),
        ("CartPole-v1?wrap=frame-stack:none", "frame-stack was given 'none': give a whole number"),
        ("CartPole-v1?wrap=time-limit:900", "cut after 500 steps: raise .* max_episode_steps=900"),
        ("CartPole-v1?wrap=no_such_module:It", "module 'no_such_module' for the wrapper cannot be"),
        ("CartPole-v1?wrap=OWN", "is a file: name a class in it, .*own.py:ClassName"),
        ("CartPole-v1?wrap=OWN:Scalde", "own.py has no wrapper 'Scalde': did you mean 'Scaled'"),
        ("CartPole-v1?wrap=OWN:Fails", "does not fit .* it raised ValueError no"),
        ("CartPole-v1?wrap=OWN:nothing", "returned a NoneType, not a gymnasium.Env"),
        ("CartPole-v1?wrap=python:Gone", "'Gone' was a Python object of another process"),
        ("CartPole-v1?vectorization=vector_entry_point&wrap=gray", "wraps single environments"),
        ("ale:pong?wrap=clip-reward", "stepped as a batch in native code"),
        ("gymnax:CartPole-v1?wrap=NormalizeReward", "gymnasium:NAME, and run it with .* local"),
        ("dovetail:CartPole-v1?wrap=time-limit:0", "time-limit was given 0"),
        ("dovetail:CartPole-v1?wrap=clip-reward:1:2:3", "was given wrong arguments"),
    ],
)
def test_a_wrapper_that_cannot_be_used_is_named(env: str, said: str, own: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve(env.replace("OWN", own))


def test_what_is_no_wrapper_is_refused() -> None:
    with pytest.raises(UserError, match="3 is no wrapper: give a name"):
        with_wraps("CartPole-v1", [3])
    with pytest.raises(UserError, match="contain '&'"):
        with_wraps("CartPole-v1", "gray&x")


def test_wrappers_given_in_python_get_names(own: str) -> None:
    flat = gymnasium.wrappers.FlattenObservation
    assert with_wraps("A-v0?x=1", [flat, "gray"]) == "A-v0?x=1&wrap=FlattenObservation,gray"
    assert with_wraps("A-v0?wrap=gray", "flatten") == "A-v0?wrap=gray,flatten"
    scaled = load_object(f"{own}:Scaled", "wrapper")
    assert reference(scaled) == f"{own}:Scaled"
    mine, other = lambda env: env, lambda env: env
    assert reference(mine) == reference(mine) != reference(other)
    env = with_wraps("A-v0", [mine])
    assert objects_of(env) == {reference(mine): mine}
    keep({"python:sent": mine})
    assert load_object("python:sent", "wrapper") is mine


def test_files_of_wrappers_can_move() -> None:
    env = "a/e.py:E?x=1&wrap=gray,b/w.py:W:3"
    assert files_of(env) == ["a/e.py", "b/w.py"]
    assert relocated(env, lambda path: f"/new/{path}") == (
        "/new/a/e.py:E?x=1&wrap=gray,/new/b/w.py:W:3"
    )


def test_names_of_atari_games_are_understood() -> None:
    old = resolve("PongNoFrameskip-v4")
    assert old.spec.id == "ale:pong" and "PongNoFrameskip-v4 runs as ale:pong" in old.note
    modern = resolve("ALE/Pong-v5")
    assert modern.spec.observation.shape == (4, 84, 84)
    assert "preprocessed as ale:pong" in modern.note and "sticky" in modern.note
    assert resolve("ale:pong").note == ""
    plain = resolve("PongNoFrameskip-v4?wrap=gray,resize:84,frame-stack:4")
    assert plain.spec.id.startswith("gymnasium:PongNoFrameskip-v4")
    assert plain.spec.observation.shape == (4, 84, 84)
    assert "plain game here, with your wrappers only; ale:pong" in plain.note


def test_statistics_that_are_not_saved_are_mentioned() -> None:
    note = resolve("CartPole-v1?wrap=NormalizeObservation").note
    assert "statistics" in note and "normalize_observations" in note
