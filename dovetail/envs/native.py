"""Small JAX environments: a control task, a memory task, and a chain with known values.

They import nothing but JAX, so they load quickly, and their options are dataclass fields:
`dovetail:MemoryCue-v0?length=16`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp

from dovetail.envs.interface import Discrete, EnvSpec, JaxEnv, JaxStep
from dovetail.envs.names import unknown_env
from dovetail.errors import UserError, nearest


class CartPoleState(NamedTuple):
    """Position, velocity, angle, angular velocity (float32[4]), and the step count."""

    physics: jax.Array
    time: jax.Array


@dataclass(frozen=True)
class CartPole:
    """The cart-pole of Gymnasium's CartPole-v1: same physics, rewards and limits."""

    limit: int = 500
    """Steps after which an episode is truncated."""

    name: ClassVar[str] = "CartPole-v1"

    @property
    def spec(self) -> EnvSpec:
        """Four numbers observed; actions push left or right."""
        return _spec(self, 4, 2, 475.0 if self.limit == 500 else None)

    def reset(self, key: jax.Array) -> tuple[CartPoleState, jax.Array]:
        """Every coordinate uniform in (-0.05, 0.05)."""
        physics = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
        return CartPoleState(physics, jnp.int32(0)), physics

    def step(self, state: CartPoleState, action: jax.Array, key: jax.Array) -> JaxStep:
        """One Euler step of 0.02 s with a force of ±10 N."""
        _, x_dot, theta, theta_dot = state.physics
        force = jnp.where(action == 1, 10.0, -10.0)
        cos, sin = jnp.cos(theta), jnp.sin(theta)
        # Total mass 1.1, pole mass 0.1, half length 0.5; 0.05 is pole mass × half length.
        push = (force + 0.05 * theta_dot**2 * sin) / 1.1
        theta_acc = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        x_acc = push - 0.05 * theta_acc * cos / 1.1
        change = jnp.stack([x_dot, x_acc, theta_dot, theta_acc])
        physics = state.physics + 0.02 * change
        time = state.time + 1
        fallen = (jnp.abs(physics[0]) > 2.4) | (jnp.abs(physics[2]) > 12 * 2 * math.pi / 360)
        after = CartPoleState(physics, time)
        return JaxStep(after, physics, jnp.float32(1), fallen, (time >= self.limit) & ~fallen)


class CueState(NamedTuple):
    """The cue to recall, and the step count."""

    cue: jax.Array
    time: jax.Array


@dataclass(frozen=True)
class MemoryCue:
    """A cue is shown in the first observation only and must be named `length` steps later.

    Observation: the cue as a one-hot vector (first step only), then a 1 when the answer is due.
    Reward 1 for the right answer. Without memory nothing beats chance.
    """

    length: int = 8
    """Steps between the cue and the answer."""
    cues: int = 2
    """Number of different cues."""

    name: ClassVar[str] = "MemoryCue-v0"

    @property
    def spec(self) -> EnvSpec:
        """The cue and the answer signal observed; actions name a cue."""
        return _spec(self, self.cues + 1, self.cues, 0.95)

    def reset(self, key: jax.Array) -> tuple[CueState, jax.Array]:
        """A uniformly random cue."""
        state = CueState(jax.random.randint(key, (), 0, self.cues), jnp.int32(0))
        return state, self._observe(state)

    def step(self, state: CueState, action: jax.Array, key: jax.Array) -> JaxStep:
        """Only the action after `length` steps counts; it ends the episode."""
        answered = state.time >= self.length
        reward = (answered & (action == state.cue)).astype(jnp.float32)
        after = CueState(state.cue, state.time + 1)
        return JaxStep(after, self._observe(after), reward, answered, jnp.bool_(False))

    def _observe(self, state: CueState) -> jax.Array:
        shown = jax.nn.one_hot(state.cue, self.cues) * (state.time == 0)
        return jnp.append(shown, state.time == self.length).astype(jnp.float32)


class ChainState(NamedTuple):
    """The current place, and the step count."""

    place: jax.Array
    time: jax.Array


@dataclass(frozen=True)
class Chain:
    """Places 0 … length-1 in a row, fully deterministic: 1 goes right, 0 goes left; starts at 0.

    The last place pays 1 and terminates, everything else pays 0, and episodes are truncated after
    `limit` steps. The value of place s under "always right" is discount ** (length - 2 - s).
    """

    length: int = 5
    """Number of places."""
    limit: int = 20
    """Steps after which an episode is truncated."""

    name: ClassVar[str] = "Chain-v0"

    @property
    def spec(self) -> EnvSpec:
        """The place observed as a one-hot vector; actions go left or right."""
        return _spec(self, self.length, 2, 1.0 if self.limit >= self.length - 1 else None)

    def reset(self, key: jax.Array) -> tuple[ChainState, jax.Array]:
        """Starts at place 0."""
        state = ChainState(jnp.int32(0), jnp.int32(0))
        return state, jax.nn.one_hot(state.place, self.length)

    def step(self, state: ChainState, action: jax.Array, key: jax.Array) -> JaxStep:
        """Moves one place left or right."""
        place = jnp.clip(state.place + jnp.where(action == 1, 1, -1), 0, self.length - 1)
        after = ChainState(place, state.time + 1)
        arrived = place == self.length - 1
        cut = (after.time >= self.limit) & ~arrived
        observation = jax.nn.one_hot(place, self.length)
        return JaxStep(after, observation, arrived.astype(jnp.float32), arrived, cut)


_KINDS = {kind.name: kind for kind in (CartPole, MemoryCue, Chain)}


def _spec(
    env: CartPole | MemoryCue | Chain, size: int, actions: int, threshold: float | None
) -> EnvSpec:
    """The spec; options that differ from the defaults appear in the id."""
    usual = type(env)()
    changed = [
        f"{field.name}={getattr(env, field.name)}"
        for field in fields(env)
        if getattr(env, field.name) != getattr(usual, field.name)
    ]
    env_id = f"dovetail:{env.name}" + ("?" + "&".join(changed) if changed else "")
    observation = jax.ShapeDtypeStruct((size,), jnp.float32)
    return EnvSpec(env_id, observation, Discrete(actions), threshold)


def names() -> list[str]:
    """The names of these environments."""
    return sorted(_KINDS)


def make(name: str, options: Mapping[str, Any], env_id: str) -> JaxEnv:
    """One of these environments with its options."""
    if name not in _KINDS:
        raise unknown_env(name, "dovetail", names())
    kind = _KINDS[name]
    known = {field.name for field in fields(kind)}
    for option, value in options.items():
        if option not in known:
            raise UserError(f"{env_id} has no option {option!r}: {nearest(option, known)}")
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{env_id} takes a whole number of at least 1 for {option}.")
    return cast(JaxEnv, kind(**options))
