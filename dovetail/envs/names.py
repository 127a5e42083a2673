"""Environment ids as users write them, and the sentences for those that cannot be resolved.

An id is `[backend:]name[?key=value&key=value]`, or `path/to/file.py:Name[?…]`.
"""

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dovetail.envs.registry import BACK_ENDS
from dovetail.errors import UserError, nearest


@dataclass(frozen=True)
class EnvId:
    """An id taken apart."""

    backend: str | None
    """A name in BACK_ENDS, "file", or None where the id does not say."""
    name: str
    """The name in the back end; the class in a file."""
    path: str
    """The file, if it is one."""
    options: dict[str, Any]
    query: str
    """The options as written, with the question mark; empty if there are none."""


def parse(text: str) -> EnvId:
    """Takes an id apart; option values are JSON where they parse as such, else strings."""
    stem, mark, query = text.partition("?")
    options: dict[str, Any] = {}
    for item in query.split("&") if query else []:
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise UserError(
                f"The option {item!r} of the environment {text!r} is not of the form key=value."
            )
        options[key] = _value(value)
    suffix = mark + query
    head, colon, name = stem.rpartition(":")
    if colon and head.endswith(".py"):
        return EnvId("file", name, head, options, suffix)
    if stem.endswith(".py"):
        raise UserError(
            f"The environment {stem!r} is a file: name a class in it, {stem}:ClassName."
        )
    prefix, colon, rest = stem.partition(":")
    if colon and prefix in BACK_ENDS:
        return EnvId(prefix, rest, "", options, suffix)
    return EnvId(None, stem, "", options, suffix)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def suggestion(name: str, known: Iterable[str]) -> str:
    """The nearest of `known`, whatever its case, or where to find them all."""
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    if near:
        return f"did you mean {by_lower[near[0]]!r}?"
    return "`dovetail list` shows what there is."


def unknown_env(name: str, where: str, known: Iterable[str]) -> UserError:
    """`name` is not among the environments that `where` knows."""
    return UserError(f"There is no environment {name!r} in {where}: {suggestion(name, known)}")


def unknown_option(env_id: str, option: str, value: Any, known: Iterable[str]) -> UserError:
    """`value` is not one of the values that `option` takes."""
    return UserError(f"{env_id} was given {option}={value}: {nearest(str(value), known)}")


def missing_extra(env_id: str, package: str, extra: str) -> UserError:
    """A package is not installed, which comes with an extra, if there is one."""
    wanted = f"'dovetail[{extra}]'" if extra else package
    return UserError(
        f"{env_id} needs {package}, which is not installed: run `pip install {wanted}`."
    )
