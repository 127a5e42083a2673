"""Decides when something recurring, such as an evaluation or a checkpoint, is due."""

import math

from dovetail.run.interval import Interval


class Recurrence:
    """An interval in progress. In steps, it is due at every multiple of the interval."""

    def __init__(self, interval: Interval, now: float, steps: int) -> None:
        """`now` is `time.perf_counter()`; `steps` were taken so far."""
        self._interval = interval
        self._now, self._steps = now, steps

    @property
    def by_steps(self) -> bool:
        """Whether the interval is in environment steps."""
        return self._interval.steps is not None

    def due(self, now: float, steps: int) -> bool:
        """Whether the interval has passed since the last `restart`."""
        every = self._interval.steps
        if every is None:
            return now - self._now >= self._interval.seconds
        return steps // every > self._steps // every

    def restart(self, now: float, steps: int) -> None:
        """Begins the next interval."""
        self._now, self._steps = now, steps

    def left(self, steps: int) -> float:
        """Environment steps until it is due; infinite for an interval in seconds."""
        every = self._interval.steps
        return math.inf if every is None else every - steps % every
