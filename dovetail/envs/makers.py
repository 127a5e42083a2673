"""Factories of Gymnasium environments, in this process or in a separate one.

They are pickled and sent to other processes, so they are top-level functions of a module that does
not import JAX.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec as Registered
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit

Maker = Callable[..., gymnasium.Env[Any, Any]]
"""Makes one environment from its options."""


class Alone(SyncVectorEnv):
    """A batch of one environment, without the overhead of batching: it exceeds many a step."""

    def __init__(self, one: Maker, autoreset: AutoresetMode | str) -> None:
        super().__init__([one], copy=False, autoreset_mode=autoreset)
        plain = isinstance(self.single_observation_space, Box)
        self._plain = plain and isinstance(self.single_action_space, Box | Discrete)
        self.info: tuple[str, ...] = ()
        """Keys of the environment's `info` to return."""

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Like SyncVectorEnv's, which handles the rare cases; `infos` holds only the keys `info`
        and final observations."""
        if self._autoreset_envs[0] or not self._plain:
            return super().step(actions)
        i = 0  # `faults` reads this variable to name the environment that raised
        seen, reward, terminated, truncated, info = self.envs[i].step(actions[i])
        self._env_obs[i] = seen
        infos: dict[str, Any] = {key: [info[key]] for key in self.info if key in info}
        if terminated or truncated:
            if self.autoreset_mode is AutoresetMode.SAME_STEP:
                infos = self._add_info(infos, {"final_obs": seen, "final_info": info}, i)
                seen, _ = self.envs[i].reset()
                self._env_obs[i] = seen
            else:
                self._autoreset_envs[i] = True
        shown: Any = self._observations
        # "same_kind" rejects observations of an incompatible dtype.
        np.copyto(shown[i], seen, casting="same_kind")
        ends = np.array([terminated], np.bool_), np.array([truncated], np.bool_)
        return shown, np.array([reward], np.float64), *ends, infos


def report_info(venv: VectorEnv[Any, Any, Any], keys: Sequence[str]) -> None:
    """Makes a batch of one return these keys of `info`; others return all of it."""
    if isinstance(venv, Alone):
        venv.info = tuple(keys)


def synchronous(one: Maker, autoreset: AutoresetMode | str, num_envs: int) -> SyncVectorEnv:
    """Single environments, stepped in turn."""
    if num_envs == 1:
        return Alone(one, autoreset)
    return SyncVectorEnv([one] * num_envs, copy=False, autoreset_mode=autoreset)


def one_or_many(one: Maker, many: Callable[[int], Any], num_envs: int) -> VectorEnv[Any, Any, Any]:
    """`many(num_envs)`, or a single environment where there is only one: the steps are the same,
    and a batch of one costs many times as much."""
    if num_envs == 1:
        return Alone(one, AutoresetMode.NEXT_STEP)
    return many(num_envs)


def by_entry_point(
    registered: Registered, creator: Callable[..., Any], options: Mapping[str, Any], num_envs: int
) -> VectorEnv[Any, Any, Any]:
    """A registered environment's own vector environment, made by `creator`."""
    entry = copy.copy(registered)
    entry.vector_entry_point = creator
    return gymnasium.make_vec(
        entry, num_envs=num_envs, vectorization_mode="vector_entry_point", **options
    )


def by_class(
    build: Callable[..., Any], options: Mapping[str, Any], num_envs: int
) -> VectorEnv[Any, Any, Any]:
    """A user's vector environment."""
    made = build(num_envs=num_envs, **options)
    if not isinstance(made, VectorEnv):
        raise TypeError(f"it is a {type(made).__name__}, not a gymnasium.vector.VectorEnv")
    return made


def limited(
    build: Maker, limit: int, options: Mapping[str, Any], **more: Any
) -> gymnasium.Env[Any, Any]:
    """One environment whose episodes are truncated after `limit` steps."""
    return TimeLimit(build(**options, **more), int(limit))
