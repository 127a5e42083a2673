"""The short wrappers for JAX environments, as pure functions around pure functions.

`frame-stack`, `clip-reward`, `time-limit` and `flatten` mean the same as around a Gymnasium
environment. Other wrappers are Python code that steps one environment, which cannot be compiled.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
                f"{env_id.partition('?')[0]} is compiled ({', '.join(SHORT_NAMES)} can be): name a "
                "Gymnasium environment, as gymnasium:NAME, and run it with --strategy local."
            )
        try:
            env = WRAPPERS[wrap.name](env, *wrap.args, **dict(wrap.kwargs))
        except TypeError as error:
            raise UserError(
                f"The wrapper {wrap.text!r} was given wrong arguments: {error}."
            ) from error
    return _Named(env, env_id)


@dataclass(frozen=True)
class _Named:
    """An environment under its full id; it is no longer the standard task, so has no threshold."""

    env: JaxEnv
    env_id: str

    @property
    def spec(self) -> EnvSpec:
        return replace(self.env.spec, id=self.env_id, threshold=None)

    def reset(self, key: jax.Array) -> tuple[Any, Observation]:
        return self.env.reset(key)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> JaxStep:
        return self.env.step(state, action, key)


@dataclass(frozen=True)
class ClippedReward:
    """Rewards clipped to [low, high]."""

    env: JaxEnv
    low: float = -1.0
    high: float = 1.0

    @property
    def spec(self) -> EnvSpec:
        """As without the wrapper."""
        return self.env.spec

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


@dataclass(frozen=True)
class LimitedTime:
    """Episodes truncated after `limit` steps."""

    env: JaxEnv
    limit: int

    def __post_init__(self) -> None:
        whole(self.limit, "time-limit")

    @property
    def spec(self) -> EnvSpec:
        """As without the wrapper."""
        return self.env.spec

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


@dataclass(frozen=True)
class StackedFrames:
    """Shows the last `size` observations as one, laid out as by `frames.FrameStack`."""

    env: JaxEnv
    size: int

    def __post_init__(self) -> None:
        whole(self.size, "frame-stack")

    @property
    def spec(self) -> EnvSpec:
        """Every array of the observation holds `size` of them."""
        one = self.env.spec.observation
        frames = jax.tree.map(lambda x: jax.ShapeDtypeStruct((self.size, *x.shape), x.dtype), one)
        return replace(self.env.spec, observation=jax.eval_shape(_joined, frames))

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


@dataclass(frozen=True)
class Flattened:
    """Observations as one vector."""

    env: JaxEnv

    @property
    def spec(self) -> EnvSpec:
        """One vector."""
        size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.env.spec.observation))
        return replace(self.env.spec, observation=jax.ShapeDtypeStruct((size,), jnp.float32))

    def reset(self, key: jax.Array) -> tuple[Any, Observation]:
        """Starts a new episode."""
        state, observation = self.env.reset(key)
        return state, _flat(observation)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> JaxStep:
        """One transition."""
        after = self.env.step(state, action, key)
        return after._replace(observation=_flat(after.observation))


WRAPPERS: dict[str, Callable[..., JaxEnv]] = {
    "clip-reward": ClippedReward,
    "flatten": Flattened,
    "frame-stack": StackedFrames,
    "time-limit": LimitedTime,
}
"""By the names of their counterparts around Gymnasium's environments."""
SHORT_NAMES = sorted(WRAPPERS)
WRAPPERS |= {
    "ClipReward": ClippedReward,
    "FlattenObservation": Flattened,
    "TimeLimit": LimitedTime,
}


def _flat(observation: Observation) -> jax.Array:
    leaves = [jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(observation)]
    return jnp.concatenate(leaves)


def _joined(frames: Observation) -> Observation:
    """The frames [size, …] of every array as one array."""

    def join(x: jax.Array) -> jax.Array:
        axis = joined_axis(x.shape[1:], x.dtype)
        return x if axis is None else jnp.concatenate(list(x), axis)

    return jax.tree.map(join, frames)
