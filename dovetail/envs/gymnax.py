"""Gymnax's environments as JAX environments, with termination and truncation distinguished.

Gymnax's own `step` resets finished episodes. This adapter uses the functions beneath it, so that
Dovetail sees the true final observation and resets with its own keys.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import gymnasium.spaces as gym_spaces
import jax
import jax.numpy as jnp
import numpy as np

from dovetail.envs.interface import EnvSpec, JaxEnv, JaxStep, Observation
from dovetail.envs.names import unknown_env
from dovetail.envs.spaces import space_map
from dovetail.errors import UserError, nearest

THRESHOLDS = {"CartPole-v1": 475.0, "Acrobot-v1": -100.0, "Pendulum-v1": -200.0}
"""Conventional thresholds for a solved task; Gymnax has no such table."""


class GymnaxEnv:
    """One Gymnax environment with its parameters."""

    def __init__(self, env: Any, params: Any, env_id: str, threshold: float | None = None) -> None:
        """`env` and `params` as `gymnax.make` returns them."""
        self._env = env
        self._params = params
        self._spaces = space_map(
            gymnasium_space(env.observation_space(params), env_id),
            gymnasium_space(env.action_space(params), env_id),
            env_id,
            xp=jnp,
            batched=False,
        )
        mapped = self._spaces
        self.spec = EnvSpec(
            env_id,
            mapped.observation,
            mapped.action,
            threshold,
            bounds=mapped.bounds,
            spaces=mapped.spaces,
        )

    def reset(self, key: jax.Array) -> tuple[Any, Observation]:
        """Starts a new episode."""
        raw, state = self._env.reset_env(key, self._params)
        return _strong(state), self._spaces.encode(raw)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> JaxStep:
        """One transition."""
        # `step_env` does not reset, unlike `step`.
        raw, after, reward, terminated, _ = self._env.step_env(
            key, state, self._spaces.decode(action), self._params
        )
        terminated = jnp.asarray(terminated, bool)
        truncated = jnp.asarray(self._env.is_truncated(after, self._params), bool) & ~terminated
        reward = jnp.asarray(reward, jnp.float32)
        return JaxStep(_strong(after), self._spaces.encode(raw), reward, terminated, truncated)


def _strong(state: Any) -> Any:
    """Python scalars as strongly typed arrays, so that reset and step return equal types."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.asarray(x).dtype), state)


def gymnasium_space(space: Any, env_id: str) -> gym_spaces.Space[Any]:
    """The Gymnasium space equivalent to one of Gymnax's."""
    from gymnax.environments import spaces

    if isinstance(space, spaces.Discrete):
        return gym_spaces.Discrete(int(space.n))
    if isinstance(space, spaces.Box):
        dtype = np.dtype(space.dtype)
        shape = tuple(space.shape)
        low = np.broadcast_to(np.asarray(space.low, dtype), shape)
        high = np.broadcast_to(np.asarray(space.high, dtype), shape)
        return gym_spaces.Box(low, high, shape, dtype.type)
    if isinstance(space, spaces.Dict):
        children = {key: gymnasium_space(child, env_id) for key, child in space.spaces.items()}
        return gym_spaces.Dict(children)
    if isinstance(space, spaces.Tuple):
        return gym_spaces.Tuple([gymnasium_space(child, env_id) for child in space.spaces])
    raise UserError(f"{env_id} has a space {type(space).__name__} that Dovetail does not map.")


def names() -> list[str]:
    """The names in Gymnax's registry."""
    from gymnax import registration

    return sorted(registration.registered_envs)


def make(name: str, options: Mapping[str, Any], env_id: str) -> JaxEnv:
    """A Gymnax environment; options are fields of its parameters or its constructor's arguments."""
    import gymnax

    if name not in names():
        raise unknown_env(name, "Gymnax", names())
    env, params = gymnax.make(name)
    known = {field.name for field in fields(params)}
    changed = {key: value for key, value in options.items() if key in known}
    rest = {key: value for key, value in options.items() if key not in known}
    try:
        if rest:
            env, params = gymnax.make(name, **rest)
    except TypeError as error:
        option = next(iter(rest))
        raise UserError(f"{env_id} has no option {option!r}: {nearest(option, known)}") from error
    threshold = None if options else THRESHOLDS.get(name)
    return GymnaxEnv(env, params.replace(**changed), env_id, threshold)
