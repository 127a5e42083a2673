"""`UserError`, the exception for mistakes that the user can fix.

Its message says what was found, where, and how to fix it. The command line prints the message
without a traceback and exits with 2; in Python it is an ordinary exception.
"""

import difflib
import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACKAGE = os.path.dirname(os.path.abspath(__file__))
STANDARD = os.path.dirname(os.path.abspath(os.__file__))


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
    """A hint for an unknown `word`, as the end of a sentence: the closest choice, or all choices if
    none is close."""
    names = sorted(choices)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"choose one of: {', '.join(names)}."


def one_sentence(error: BaseException) -> str:
    """An error's message; of any other exception than a `UserError` with its type, and with the
    user's file and line where it arose there."""
    if isinstance(error, UserError):
        return str(error)
    # Some libraries append explanations after an empty line.
    told = " ".join(str(error).split("\n\n")[0].split()).rstrip(".")
    place = user_line(error)
    return f"{place}: " * bool(place) + f"{type(error).__name__}: {told or 'no message'}."


def user_line(error: BaseException) -> str:
    """The innermost file:line of an error in the user's own code; empty if there is none."""
    found, frame = "", error.__traceback__
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if is_users(file):
            found = f"{file}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found


def is_users(file: str) -> bool:
    """Whether a source file is neither Dovetail's, nor Python's, nor an installed package's."""
    if file.startswith("<"):  # made by Python or a package, except what is typed in or piped
        return file.startswith(("<stdin>", "<ipython-input"))
    installed = "site-packages" in file or "dist-packages" in file
    return not (installed or file.startswith((PACKAGE + os.sep, STANDARD + os.sep)))


def defined_at(function: Any) -> str:
    """`file:line: ` of a function or method in the user's own code, as the start of a sentence;
    empty for any other."""
    function = getattr(function, "__wrapped__", function)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None or not is_users(code.co_filename):
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}: "


def command(*words: str | Path) -> str:
    """A command line to copy into a shell."""
    return shlex.join(["dovetail", *map(str, words)])
