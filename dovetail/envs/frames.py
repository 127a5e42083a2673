"""The wrappers with short names: `clip-reward`, `flatten`, `frame-stack`, `gray`, and others.

Each is a function of a Gymnasium environment and its arguments. Environment processes call them,
so this module does not import JAX.
"""

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import wrappers
from gymnasium.spaces import Box, Dict, Space

from dovetail.errors import UserError

GymEnv = gymnasium.Env[Any, Any]


def clip_reward(env: GymEnv, low: float = -1.0, high: float = 1.0) -> GymEnv:
    """Rewards clipped to [low, high]."""
    return wrappers.ClipReward(env, low, high)


def flatten(env: GymEnv) -> GymEnv:
    """Observations as one vector."""
    return wrappers.FlattenObservation(env)


def frame_stack(env: GymEnv, size: int) -> GymEnv:
    """Each observation joined with the `size - 1` before it: see `FrameStack`."""
    return FrameStack(env, whole(size, "frame-stack"))


def gray(env: GymEnv) -> GymEnv:
    """Color images [H, W, 3] as gray ones [H, W]."""
    return wrappers.GrayscaleObservation(env)


def resize(env: GymEnv, height: int, width: int | None = None) -> GymEnv:
    """Images scaled to height × width; a square without `width`."""
    high = whole(height, "resize")
    return wrappers.ResizeObservation(env, (high, whole(width or high, "resize")))


def time_limit(env: GymEnv, steps: int) -> GymEnv:
    """Episodes truncated after `steps` steps."""
    limit = whole(steps, "time-limit")
    known = env.spec.max_episode_steps if env.spec is not None else None
    if known is not None and known < limit:
        raise UserError(
            f"time-limit:{limit} has no effect, since {env.spec.id if env.spec else env} is cut "
            f"after {known} steps: raise that limit with the option max_episode_steps={limit} of "
            "the environment's id."
        )
    return wrappers.TimeLimit(env, limit)


def whole(value: object, name: str) -> int:
    """`value` if it is a whole number of at least 1; `name` is the wrapper's."""
    if type(value) is not int or value < 1:
        raise UserError(f"{name} was given {value!r}: give a whole number of at least 1.")
    return value


class FrameStack(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Shows the last `size` observations as one; an episode begins with copies of its first.

    Images with channels are joined along their channels, gray images [H, W] become [size, H, W],
    and other arrays are joined along their last axis. The entries of a Dict are joined one by one.
    """

    def __init__(self, env: GymEnv, size: int) -> None:
        """`size` is the number of observations, the newest last."""
        super().__init__(env)
        self._seen: deque[Any] = deque(maxlen=size)
        self.observation_space = _stacked(env.observation_space, size)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Starts a new episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        # Copied, because some environments write every observation into the same array.
        self._seen.extend([copy.deepcopy(observation)] * (self._seen.maxlen or 1))
        return self._joined(), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One transition."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._seen.append(copy.deepcopy(observation))
        return self._joined(), reward, terminated, truncated, info

    def _joined(self) -> Any:
        return _join(self.env.observation_space, list(self._seen))


def joined_axis(shape: Sequence[int], dtype: Any) -> int | None:
    """The axis along which arrays of this shape are stacked; None for a new first axis."""
    if len(shape) == 3:  # the first axis holds the channels if it is shorter than the last
        return 0 if shape[0] < shape[-1] else -1
    return -1 if len(shape) == 1 or (len(shape) == 2 and dtype != np.uint8) else None


def _stacked(space: Space[Any], size: int) -> Space[Any]:
    if isinstance(space, Dict):
        return Dict({name: _stacked(part, size) for name, part in space.spaces.items()})
    if not isinstance(space, Box):
        raise UserError(
            f"frame-stack joins Box observations, and this one is {type(space).__name__}: flatten "
            "it first, as in --wrap flatten,frame-stack:4."
        )
    low, high = (_join(space, [bound] * size) for bound in (space.low, space.high))
    return Box(low, high, dtype=space.dtype.type)


def _join(space: Space[Any], frames: list[Any]) -> Any:
    if isinstance(space, Dict):
        return {
            name: _join(part, [frame[name] for frame in frames])
            for name, part in space.spaces.items()
        }
    arrays = [np.asarray(frame) for frame in frames]
    axis = joined_axis(arrays[0].shape, arrays[0].dtype)
    return np.stack(arrays) if axis is None else np.concatenate(arrays, axis)
