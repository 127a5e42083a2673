"""Logged values of the environments' `info`: an array [B, K], NaN where a value is missing."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dovetail.envs.info_values import table
from dovetail.envs.interface import EnvSpec, HostEnv, HostStep, JaxEnv, JaxStep, Observation
from dovetail.envs.resolve import Env

INFO = "info"


def with_info(env: Env, keys: Sequence[str]) -> Env:
    """The environment with the values of `keys` in the `info` of every step; see `HostStep`."""
    if not keys:
        return env
    spec = replace(env.spec, info=tuple(keys))
    host, process = env.host, env.process
    return replace(
        env,
        spec=spec,
        jax=None if env.jax is None else _TracedInfo(env.jax, spec),
        host=None if host is None else _informed(host, spec),
        process=None if process is None else partial(process, info=spec.info),
    )


def _informed(host: Callable[..., HostEnv], spec: EnvSpec) -> Callable[[int], HostEnv]:
    """A factory of batches that report `spec.info`: by themselves, or in a wrapper."""
    if INFO in inspect.signature(host).parameters:
        return partial(host, info=spec.info)
    return lambda num_envs: _HostInfo(host(num_envs), spec)


class _TracedInfo:
    """A JAX environment whose spec names the values to log."""

    def __init__(self, env: JaxEnv, spec: EnvSpec) -> None:
        self._env, self.spec = env, spec

    def reset(self, key: Any) -> tuple[Any, Observation]:
        """Starts a new episode."""
        return self._env.reset(key)

    def step(self, state: Any, action: Any, key: Any) -> JaxStep:
        """One transition."""
        return self._env.step(state, action, key)


class _HostInfo:
    """A user's `HostEnv`, whose steps have a dict of arrays [B] in their `info`."""

    def __init__(self, env: HostEnv, spec: EnvSpec) -> None:
        self._env, self.spec, self.num_envs = env, spec, env.num_envs

    def reset(self, seeds: list[int]) -> Observation:
        """Starts an episode in every environment."""
        return self._env.reset(seeds)

    def step(self, action: np.ndarray) -> HostStep:
        """One transition in every environment."""
        after = self._env.step(action)
        found: Mapping[str, Any] = after.info if isinstance(after.info, Mapping) else {}
        return after._replace(info=table(found, self.spec.info, self.num_envs))

    def close(self) -> None:
        """Releases the environments' resources."""
        self._env.close()
