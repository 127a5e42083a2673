"""Tells a caller that a run begins: its inputs are accepted, and its folder exists.

The command line uses it to print the equivalent Python only for what works, so that an error stands
alone.
"""

from collections.abc import Callable
from contextvars import ContextVar

_told: ContextVar[Callable[[], None] | None] = ContextVar("told", default=None)


def when_accepted(tell: Callable[[], None]) -> None:
    """Calls `tell` when the next run of this context begins."""
    _told.set(tell)


def accepted() -> None:
    """Says that a run begins; called once for each start."""
    tell = _told.get()
    _told.set(None)
    if tell is not None:
        tell()
