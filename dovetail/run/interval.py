"""Intervals between evaluations or checkpoints: in seconds, or in environment steps."""

import math
import re
from dataclasses import dataclass

from dovetail.errors import UserError

UNITS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}
"""Units of time, in seconds."""
STEPS = ("step", "steps")
_TEXT = re.compile(r"([0-9._]+(?:e[+]?[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)


@dataclass(frozen=True)
class Interval:
    """Something happens every `seconds`, or every `steps` environment steps."""

    seconds: float = math.inf
    steps: int | None = None
    """None for an interval in seconds."""

    @classmethod
    def of(cls, value: float | str, option: str) -> "Interval":
        """Reads `10`, `"10s"`, `"5min"` or `"10000steps"`; raises with the name of the option."""
        if isinstance(value, str):
            return _parsed(value, option)
        if isinstance(value, bool) or not value >= 0:
            raise _refusal(value, option)
        return cls(seconds=float(value))

    @property
    def is_zero(self) -> bool:
        """Whether it is 0 seconds."""
        return self.seconds == 0


def _parsed(text: str, option: str) -> Interval:
    found = _TEXT.fullmatch(text.strip())
    try:
        number, unit = (float(found[1]), found[2].lower()) if found else (math.nan, "")
    except ValueError:
        raise _refusal(text, option) from None
    if unit in STEPS and number >= 1 and number == int(number):
        return Interval(steps=int(number))
    if unit in UNITS and number >= 0:
        return Interval(seconds=number * UNITS[unit])
    raise _refusal(text, option)


def _refusal(value: object, option: str) -> UserError:
    return UserError(
        f"--{option.replace('_', '-')} is {value}: give 0 or more seconds, as 10, 10s or 5min, or "
        "environment steps, as 10000steps."
    )
