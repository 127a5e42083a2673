"""`UserError`, the exception for mistakes that the user can fix.

Its message says what was found, where, and how to fix it. The command line prints the message
without a traceback and exits with 2; in Python it is an ordinary exception.
"""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake that the user can fix; its message is one complete sentence."""


class ServerGone(UserError):
    """A server that several workers use is gone; restarting the worker that called it would not
    help."""


def check_option(name: str, value: object, fits: bool, wanted: str) -> None:
    """Raises unless `fits`; `wanted` describes the valid values of option `name`."""
    if not fits:
        raise UserError(f"--{name.strip('_').replace('_', '-')} is {value}: give {wanted}.")


def nearest(word: str, choices: Iterable[str]) -> str:
    """A hint for an unknown `word`: the closest choice, or all choices if none is close."""
    names = sorted(choices)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"choose one of: {', '.join(names)}"
