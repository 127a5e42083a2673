"""Functions that make Gymnasium environments, in this process or in one of their own.

They can be sent to other processes, so they stand at the top of a module that imports no JAX.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec as Registered
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit

Maker = Callable[..., gymnasium.Env[Any, Any]]
"""Makes one environment from its options."""


def synchronous(one: Maker, autoreset: AutoresetMode | str, num_envs: int) -> SyncVectorEnv:
    """Single environments, stepped one after the other."""
    return SyncVectorEnv([one] * num_envs, copy=False, autoreset_mode=autoreset)


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
    """One environment whose episodes are cut after `limit` steps."""
    return TimeLimit(build(**options, **more), int(limit))
