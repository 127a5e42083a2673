"""Environments for the tests of processes; no JAX here, for those processes import it."""

import os
import signal
import sys
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv


class Room(gymnasium.Env):
    """An image, a position and a kind; ends by chance, and is cut after five steps."""

    observation_space = spaces.Dict(
        {
            "position": spaces.Box(-100, 100, (2,), np.float64),
            "eye": spaces.Box(0, 255, (3, 2), np.uint8),
            "kind": spaces.Discrete(3),
        }
    )
    action_space = spaces.Box(-2, 2, (2,), np.float32)

    def see(self) -> dict[str, Any]:
        eye = self.np_random.integers(0, 256, (3, 2)).astype(np.uint8)
        return {"position": self.position, "eye": eye, "kind": int(self.np_random.integers(3))}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.time, self.last = self.np_random.normal(size=2), 0, np.zeros(2)
        return self.see(), {"info": 1}

    def step(self, action):
        """Pays for how much the action has changed: it keeps the array it was given."""
        reward, self.last = float(np.abs(action - self.last).sum()), action
        self.position = self.position + action
        self.time += 1
        return self.see(), reward, self.np_random.random() < 0.1, self.time == 5, {}


class Trouble(gymnasium.Env):
    """Does something wrong at its third step, in the environment with an odd seed."""

    observation_space = spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, kind: str = "none") -> None:
        self.kind = kind

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.odd = 0, seed is not None and seed % 2 == 1
        if self.kind == "no reset" and self.odd:
            raise OSError("no map")
        return self.see(), {}

    def see(self) -> np.ndarray:
        return np.array([os.getpid(), "jax" in sys.modules], np.float32)

    def step(self, action):
        self.time += 1
        if self.odd and self.time == 3:
            match self.kind:
                case "raise":
                    raise ValueError("out of fuel")
                case "exit":
                    sys.exit(3)
                case "end":
                    os._exit(3)
                case "shape":
                    return np.zeros(3, np.float32), 0.0, False, False, {}
                case "nan":
                    return np.full(2, np.nan, np.float32), 0.0, False, False, {}
                case "sleep":
                    time.sleep(60)
                case "crash":
                    os.kill(os.getpid(), signal.SIGSEGV)
                case _:
                    pass
        return self.see(), 1.0, False, False, {}


class Words(gymnasium.Env):
    """Shows what has no fixed size."""

    observation_space = spaces.Text(8)
    action_space = spaces.Discrete(2)


class Pairs(VectorEnv):
    """Takes and shows tuples; takes a single seed for all."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        pair = spaces.Tuple((spaces.Box(-1e9, 1e9, (), np.float64), spaces.MultiBinary(3)))
        self.single_observation_space = self.single_action_space = pair

    def reset(self, *, seed=None, options=None):
        return (
            np.full(self.num_envs, (seed or 0) % 1000, np.float64),
            np.ones((self.num_envs, 3)),
        ), {}

    def step(self, actions):
        no = np.zeros(self.num_envs, np.bool_)
        return actions, actions[0] * 2, no, no, {}


class Wide(VectorEnv):
    """Returns rewards, or observations, of the wrong shape, or does not say how it resets."""

    def __init__(self, num_envs: int, wrong: str) -> None:
        self.num_envs, self.wrong = num_envs, wrong
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP} if wrong != "metadata" else {}
        self.single_observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.single_action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros((self.num_envs, 2), np.float32), {}

    def step(self, actions):
        n, no = self.num_envs, np.zeros(self.num_envs, np.bool_)
        seen = np.zeros((n, 1 if self.wrong == "observation" else 2), np.float32)
        reward = np.zeros((n, 1) if self.wrong == "reward" else n, np.float32)
        return seen, reward, no, no, {}
