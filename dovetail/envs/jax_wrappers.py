"""The short wrappers for JAX environments, as pure functions around pure functions.

`frame-stack`, `clip-reward`, `time-limit` and `flatten` mean the same as around a Gymnasium
environment. Other wrappers are Python code that steps one environment, which cannot be compiled.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.envs.frames import joined_axis, whole
from dovetail.envs.interface import EnvSpec, JaxEnv, JaxStep, Observation
from dovetail.envs.wrapping import Wrap
from dovetail.errors import UserError


def jax_wrapped(env: JaxEnv, wraps: Sequence[Wrap], env_id: str) -> JaxEnv:
    """The environment in its wrappers, the first innermost."""
    for wrap in wraps:
        if wrap.name not in WRAPPERS:
            raise UserError(
                f"The wrapper {wrap.text!r} is Python code around one environment, and "
                f"{env_id.partition('?')[0]} is compiled ({', '.join(SHORT)} can be): name a "
                "Gymnasium environment, as gymnasium:NAME, and run it with --strategy local."
            )
        try:
            env = WRAPPERS[wrap.name](env, *wrap.args, **dict(wrap.kwargs))
        except TypeError as error:
            raise UserError(
                f"The wrapper {wrap.text!r} was given wrong arguments: {error}."
            ) from error
    # No longer the standard task, so without its threshold.
    env.spec = replace(env.spec, id=env_id, threshold=None)
    return env


class ClippedReward:
    """Rewards clipped to [low, high]."""

    def __init__(self, env: JaxEnv, low: float = -1.0, high: float = 1.0) -> None:
        self.env, self.low, self.high = env, low, high
        self.spec: EnvSpec = env.spec

    def reset(self, key: jax.Array) -> tuple[Any, Observation]:
        """Starts a new episode."""
        return self.env.reset(key)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> JaxStep:
        """One transition."""
        after = self.env.step(state, action, key)
        return after._replace(reward=jnp.clip(after.reward, self.low, self.high))


class LimitedState(NamedTuple):
    """The environment's state, and the number of steps since its reset."""

    inner: Any
    time: jax.Array


class LimitedTime:
    """Episodes truncated after `limit` steps."""

    def __init__(self, env: JaxEnv, limit: int) -> None:
        self.env, self.limit = env, whole(limit, "time-limit")
        self.spec: EnvSpec = env.spec

    def reset(self, key: jax.Array) -> tuple[LimitedState, Observation]:
        """Starts a new episode."""
        state, observation = self.env.reset(key)
        return LimitedState(state, jnp.int32(0)), observation

    def step(self, state: LimitedState, action: jax.Array, key: jax.Array) -> JaxStep:
        """One transition."""
        after = self.env.step(state.inner, action, key)
        time = state.time + 1
        return after._replace(
            state=LimitedState(after.state, time),
            truncated=(after.truncated | (time >= self.limit)) & ~after.terminated,
        )


class StackedState(NamedTuple):
    """The environment's state, and its last observations, [size, …] in every leaf."""

    inner: Any
    frames: Any


class StackedFrames:
    """Shows the last `size` observations as one, laid out as by `frames.FrameStack`."""

    def __init__(self, env: JaxEnv, size: int) -> None:
        self.env, self.size = env, whole(size, "frame-stack")
        frames = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), env.spec.observation
        )
        self.spec: EnvSpec = replace(env.spec, observation=jax.eval_shape(_joined, frames))

    def reset(self, key: jax.Array) -> tuple[StackedState, Observation]:
        """Starts a new episode, with copies of its first observation."""
        state, first = self.env.reset(key)
        frames = jax.tree.map(lambda x: jnp.repeat(x[None], self.size, axis=0), first)
        return StackedState(state, frames), _joined(frames)

    def step(self, state: StackedState, action: jax.Array, key: jax.Array) -> JaxStep:
        """One transition."""
        after = self.env.step(state.inner, action, key)
        frames = jax.tree.map(
            lambda old, new: jnp.concatenate([old[1:], new[None]]), state.frames, after.observation
        )
        return after._replace(state=StackedState(after.state, frames), observation=_joined(frames))


class Flattened:
    """Observations as one vector."""

    def __init__(self, env: JaxEnv) -> None:
        self.env = env
        size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(env.spec.observation))
        vector = jax.ShapeDtypeStruct((size,), jnp.float32)
        self.spec: EnvSpec = replace(env.spec, observation=vector)

    def reset(self, key: jax.Array) -> tuple[Any, Observation]:
        """Starts a new episode."""
        state, observation = self.env.reset(key)
        return state, _flat(observation)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> JaxStep:
        """One transition."""
        after = self.env.step(state, action, key)
        return after._replace(observation=_flat(after.observation))


SHORT: dict[str, Callable[..., JaxEnv]] = {
    "clip-reward": ClippedReward,
    "flatten": Flattened,
    "frame-stack": StackedFrames,
    "time-limit": LimitedTime,
}
WRAPPERS: dict[str, Callable[..., JaxEnv]] = {
    **SHORT,
    "ClipReward": ClippedReward,
    "FlattenObservation": Flattened,
    "TimeLimit": LimitedTime,
}
"""By their names around Gymnasium's environments."""


def _flat(observation: Observation) -> jax.Array:
    leaves = [jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(observation)]
    return jnp.concatenate(leaves)


def _joined(frames: Observation) -> Observation:
    """The frames [size, …] of every array as one array."""

    def join(x: jax.Array) -> jax.Array:
        axis = joined_axis(x.shape[1:], x.dtype)
        return x if axis is None else jnp.concatenate(list(x), axis)

    return jax.tree.map(join, frames)
