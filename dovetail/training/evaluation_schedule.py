"""Decides when the current policy is evaluated during training."""

import math

from dovetail.run.settings import Settings
from dovetail.training.recurrence import Recurrence

NEAR = 0.05
"""Training returns within this fraction of the goal trigger an evaluation."""
REST = 3.0
"""Pause between evaluations that training returns trigger, in multiples of an evaluation's time."""


class EvaluationSchedule:
    """Evaluates at the interval of the settings, and sooner when the goal may be reached.

    By steps it evaluates at the interval only, so that a run can be repeated exactly.
    """

    def __init__(self, settings: Settings, now: float, steps: int) -> None:
        """`now` is `time.perf_counter()`; `steps` were taken so far."""
        interval = settings.evaluation_interval
        self._never = interval.is_zero or settings.seeds > 1
        self._goal = settings.until
        self._recurrence = Recurrence(interval, now, steps)
        self._asked, self._rest = -math.inf, 0.0
        self._first_return: float | None = None

    @property
    def by_steps(self) -> bool:
        """Whether the interval is in environment steps."""
        return self._recurrence.by_steps

    def left(self, steps: int) -> float:
        """Environment steps until an evaluation is due; infinite for an interval in seconds."""
        return math.inf if self._never else self._recurrence.left(steps)

    def due(self, now: float, steps: int) -> bool:
        """Whether the interval has passed."""
        return not self._never and self._recurrence.due(now, steps)

    def wanted(self, now: float, steps: int, recent: float | None) -> bool:
        """Whether to evaluate now; `recent` is the training return of late."""
        if self._never or self.by_steps:
            return self.due(now, steps)
        rested = now - self._asked >= self._rest
        return self.due(now, steps) or (self._nears_goal(recent) and rested)

    def asked(self, now: float, steps: int) -> None:
        """Notes the start of an evaluation."""
        self._asked = now
        self._recurrence.restart(now, steps)

    def answered(self, now: float) -> None:
        """Notes the end of the evaluation."""
        self._rest = REST * (now - self._asked)

    def _nears_goal(self, recent: float | None) -> bool:
        """Whether the training return is at least halfway from the first one to the goal.

        A policy that explores returns less than the greedy one, which may have reached it.
        """
        if self._goal is None or recent is None:
            return False
        if self._first_return is None:
            self._first_return = recent
        halfway = (self._first_return + self._goal) / 2
        return recent >= min(halfway, self._goal - NEAR * abs(self._goal))
