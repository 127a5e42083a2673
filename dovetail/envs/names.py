"""Parses environment ids, and phrases the errors for ids that cannot be resolved.

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
    """A parsed id."""

    backend: str | None
    """A name in BACK_ENDS, "file", or None if the id has no prefix."""
    name: str
    """The name within the back end, or the class in a file."""
    path: str
    """The file; empty for other ids."""
    options: dict[str, Any]
    query: str
    """The options as written, with the question mark; empty if there are none."""


def parse(text: str) -> EnvId:
    """Parses an id; option values are read as JSON where possible, otherwise as strings."""
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


def with_option(env_id: str, key: str, value: str) -> str:
    """The id with one more option; an earlier value of the same key is replaced."""
    stem, _, query = env_id.partition("?")
    kept = [item for item in query.split("&") if item and item.partition("=")[0] != key]
    return f"{stem}?{'&'.join([*kept, f'{key}={value}'])}"


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def suggestion(name: str, known: Iterable[str]) -> str:
    """The closest of `known`, ignoring case, or where to find them all."""
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    if near:
        return f"did you mean {by_lower[near[0]]!r}?"
    return "`dovetail list envs` shows what there is."


def unknown_env(name: str, where: str, known: Iterable[str]) -> UserError:
    """The error for a name that back end `where` does not have."""
    return UserError(f"There is no environment {name!r} in {where}: {suggestion(name, known)}")


def unknown_option(env_id: str, option: str, value: Any, known: Iterable[str]) -> UserError:
    """The error for a value that `option` does not accept."""
    return UserError(f"{env_id} was given {option}={value}: {nearest(str(value), known)}")


def missing_extra(env_id: str, package: str, extra: str) -> UserError:
    """The error for a package that is not installed, naming the extra that brings it, if any."""
    wanted = f"'dovetail[{extra}]'" if extra else package
    return UserError(
        f"{env_id} needs {package}, which is not installed: run `pip install {wanted}`."
    )
