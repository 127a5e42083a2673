"""The one exception that carries a sentence for the user.

Everything a user can get wrong is reported as a `UserError`: what was found, where, and what to
do about it. The command line prints the sentence and exits with 2; Python shows it as any error.
"""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can put right; its text is one complete sentence."""


class ServerGone(UserError):
    """A server that several workers use is gone: to set up again who asked it does not help."""


def check_option(name: str, value: object, fits: bool, wanted: str) -> None:
    """Refuses an option whose value cannot be; `wanted` says what could."""
    if not fits:
        raise UserError(f"--{name.strip('_').replace('_', '-')} is {value}: give {wanted}.")


def nearest(word: str, choices: Iterable[str]) -> str:
    """A hint for an unknown `word`: the nearest choice, or all of them if none is near."""
    names = sorted(choices)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"choose one of: {', '.join(names)}"
