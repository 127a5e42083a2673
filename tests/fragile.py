"""Environments that fail on purpose: in a file of their own, so that processes can load them."""

import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np


class Fragile(gymnasium.Env[Any, Any]):
    """Goes wrong at step `at` of an environment's life: `how` is raise, sleep or exit.

    With a `marker` (a path) it goes wrong once in all: whoever makes the file first.
    """

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(
        self, how: str = "raise", at: int = 10, marker: str = "", seconds: float = 600
    ) -> None:
        self._how, self._at, self._marker, self._seconds = how, at, marker, seconds
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """A random observation."""
        super().reset(seed=seed)
        return self._show(), {}

    def step(self, action: Any) -> Any:
        """One transition, or what was asked for."""
        self._steps += 1
        if self._steps == self._at and self._is_my_turn():
            if self._how == "sleep":
                time.sleep(self._seconds)
            if self._how == "exit":
                os._exit(3)
            raise ValueError("the cart fell off")
        return self._show(), 1.0, self._steps % 7 == 0, False, {}

    def _is_my_turn(self) -> bool:
        if not self._marker:
            return True
        try:
            Path(self._marker).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _show(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)
