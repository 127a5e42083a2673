"""An environment whose `info` has numbers to log; in its own module, for other processes."""

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from dovetail.envs.interface import Discrete, EnvSpec, JaxStep

LENGTH = 5


class Informing(gymnasium.Env[Any, Any]):
    """Episodes of five steps; `time` is the step, `success` appears at the end, `name` is text."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {"time": 1000.0}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        end = self.time == LENGTH
        info = {"time": self.time, "name": "text"} | ({"success": True} if end else {})
        return np.zeros(2, np.float32), 1.0, end, False, info


class InformingJax:
    """The same in JAX; `success` is NaN before the end."""

    spec = EnvSpec("informing", jax.ShapeDtypeStruct((2,), jnp.float32), Discrete(2))

    def reset(self, key: Any) -> tuple[Any, Any]:
        return jnp.int32(0), jnp.zeros(2)

    def step(self, state: Any, action: Any, key: Any) -> JaxStep:
        time = state + 1
        end = time == LENGTH
        info = {"time": time, "success": jnp.where(end, 1.0, jnp.nan)}
        return JaxStep(time, jnp.zeros(2), jnp.float32(1), end, jnp.array(False), info)
