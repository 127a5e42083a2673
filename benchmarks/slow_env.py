"""An environment whose step takes two milliseconds of the processor's time, in Python.

However many share the processor, each has to find its own time: what stepping in several processes
can make faster, and threads cannot.
"""

import time
from typing import Any

import gymnasium
import numpy as np

STEP_SECONDS = 2e-3
EPISODE_STEPS = 200


class Slow(gymnasium.Env[np.ndarray, int]):
    """Shows four zeros and pays 1 for every step, two hundred times."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)  # type: ignore[assignment]

    def __init__(self) -> None:
        self._steps = 0
        self._seen = np.zeros(4, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """A new episode."""
        super().reset(seed=seed)
        self._steps = 0
        return self._seen, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Burns the time, in the thread that steps."""
        end = time.thread_time() + STEP_SECONDS
        while time.thread_time() < end:
            pass
        self._steps += 1
        return self._seen, 1.0, False, self._steps >= EPISODE_STEPS, {}
