"""Callbacks: a user's functions that see a run's events and may stop it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dovetail.errors import UserError, user_line
from dovetail.loading import load_object
from dovetail.run.folder import Run

EventName = Literal["report", "evaluation", "checkpoint", "end"]


@dataclass(frozen=True)
class TrainingEvent:
    """What a callback is given."""

    name: EventName
    """One of "report", after some updates, several times a second; "evaluation", when one has
    finished; "checkpoint", when one is written; "end", when the folder of the run is complete."""
    step: int
    """Environment steps so far (gradient steps offline); for an evaluation, those of its policy."""
    update: int
    """Updates of the learner so far; for an evaluation, those of its policy."""
    total_steps: int
    """Steps that the run will take in all, if nothing stops it."""
    seconds: float
    """Wall time of the run so far, earlier starts included."""
    metrics: Mapping[str, float]
    """A report's metrics by their names in metrics.csv; empty for other events."""
    eval_return: float | None
    """Mean return of the last evaluation; None before the first."""
    run: Run
    """The run: `event.run.path` is its folder."""


Callback = Callable[[TrainingEvent], Any]
"""Called with every event, in the thread that drives the run. Returning False stops the run."""
Given = Callback | str | Sequence[Callback | str] | None
"""A callback as users give it: a function, "file.py:function" or "module:function", or several."""


class Callbacks:
    """The callbacks of a run."""

    def __init__(self, given: Given = None) -> None:
        """Loads and checks them; raises if one cannot be called with an event."""
        several = [] if given is None else given
        several = [several] if isinstance(several, str) or callable(several) else list(several)
        self._functions = [_checked(one) for one in several]
        self.names = [_anywhere(one) for one in several if isinstance(one, str)]
        """Those given by name, which a resumed run calls again."""
        self.stopped_by: str | None = None
        """The callback that stopped the run; None if none has."""

    def __bool__(self) -> bool:
        return bool(self._functions)

    def call(self, event: TrainingEvent) -> None:
        """Calls each of them; remembers the first that returns False."""
        for function in self._functions:
            try:
                answer = function(event)
            except Exception as error:
                raise _failure(function, error, event) from error
            if isinstance(answer, bool | np.bool_) and not answer and event.name != "end":
                self.stopped_by = self.stopped_by or _name(function)


def _checked(given: Any) -> Callback:
    found = load_object(given, "callback") if isinstance(given, str) else given
    name = given if isinstance(given, str) else _name(found)
    wanted = "give a function of one argument, the event: def callback(event)"
    if not callable(found) or isinstance(found, type):
        kind = "a class" if isinstance(found, type) else f"a {type(found).__name__}"
        raise UserError(f"The callback {name} is {kind}: {wanted}.")
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise UserError(f"The callback {name} cannot take an event ({error}): {wanted}.") from error
    except ValueError:  # a built-in function without a signature
        pass
    return found


def _anywhere(name: str) -> str:
    """The name with an absolute path, so that a run can be resumed in another folder."""
    place, _, function = name.rpartition(":")
    return f"{Path(place).resolve()}:{function}" if place.endswith(".py") else name


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _failure(function: Callback, error: Exception, event: TrainingEvent) -> UserError:
    """The error of a callback that raised, with its file and line."""
    line = user_line(error)
    where = f" at {line}," if line else ""
    what = f"{type(error).__name__}: {error}".rstrip(": .")
    return UserError(
        f"The callback {_name(function)} raised{where} at step {event.step:,}: {what}."
    )
