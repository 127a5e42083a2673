"""A back end of a test's own: two JAX environments and nothing else."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.envs.interface import Discrete, EnvSpec, JaxStep
from dovetail.envs.names import unknown_env

NAMES = ["Coin-v0", "Die-v0"]


class Guess:
    """One step: guess a number at random."""

    def __init__(self, sides: int, env_id: str) -> None:
        self.sides = sides
        self.spec = EnvSpec(env_id, jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(sides))

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        return (), jnp.zeros(1)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> JaxStep:
        hit = action == jax.random.randint(key, (), 0, self.sides)
        return JaxStep((), jnp.zeros(1), hit.astype(jnp.float32), jnp.bool_(True), jnp.bool_(False))


def names() -> list[str]:
    return NAMES


def make(name: str, options: Mapping[str, Any], env_id: str) -> Guess:
    if name not in NAMES:
        raise unknown_env(name, "the toys", NAMES)
    return Guess(2 if name == "Coin-v0" else 6, env_id)
