"""Converts text from the command line and values from TOML to the annotated types of options."""

import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from dovetail.errors import UserError

WRONG = (ValueError, TypeError, OverflowError, KeyError)
"""The exceptions of a failed conversion."""
NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    type(None): "none",
    Any: "a name",
}


def convert(value: object, kind: Any, what: str) -> Any:
    """Converts `value` to the type `kind`; `what` names the option in the error message."""
    try:
        return _convert(value, kind)
    except WRONG:
        raise UserError(f"{what} wants {describe(kind)}, not {value!r}.") from None


def numbers(given: Mapping[str, Any], *names: str) -> dict[str, int]:
    """The given flags among `names` as integers, by their Python names."""
    found = {name: convert(given[name], int, f"--{name}") for name in names if name in given}
    return {name.replace("-", "_"): value for name, value in found.items()}


def describe(kind: Any) -> str:
    """The accepted values of a type, in words."""
    if kind in NAMES:
        return NAMES[kind]
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(map(describe, arguments))
    if get_origin(kind) in (tuple, list):
        items = dict.fromkeys(describe(item) for item in arguments if item is not ...)
        return f"a comma-separated list ({', '.join(items)})"
    return "a value that only Python can give"


def _convert(value: object, kind: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {str(choice): choice for choice in arguments}[str(value)]
    if origin in (Union, types.UnionType):
        return _first_that_fits(value, arguments)
    if origin in (tuple, list):
        return _sequence(value, origin, arguments)
    if kind is type(None):
        return _only(None, value is None or str(value).lower() == "none")
    if kind is bool:
        return _only(str(value).lower() == "true", str(value).lower() in ("true", "false"))
    if kind in (int, float) and not isinstance(value, bool):
        return _number(value, kind)
    if kind in (str, Any) and isinstance(value, str):
        return value
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError


def _number(value: object, kind: type) -> int | float:
    """Converts a number; integers may be written as 200_000 or 2e5."""
    if not isinstance(value, int | float | str):
        raise TypeError
    # Plain digits do not go through float, which would round large integers.
    if kind is int and isinstance(value, str) and value.replace("_", "").lstrip("+-").isdigit():
        return int(value)
    number = float(value)
    if math.isnan(number):
        raise ValueError
    return number if kind is float else _only(int(number), number == int(number))


def _sequence(value: object, origin: type, arguments: tuple[Any, ...]) -> Any:
    items = [item for item in value.split(",") if item] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise TypeError
    if origin is tuple and arguments[-1:] != (...,):
        pairs = zip(items, arguments, strict=True)
        return tuple(_convert(item, kind) for item, kind in pairs)
    return origin(_convert(item, arguments[0]) for item in items)


def _first_that_fits(value: object, kinds: tuple[Any, ...]) -> Any:
    """Converts to the first type that fits; `none` is tried before text."""
    for kind in sorted(kinds, key=lambda kind: kind is not type(None)):
        try:
            return _convert(value, kind)
        except WRONG:
            continue
    raise ValueError


def _only(value: Any, fits: bool) -> Any:
    if not fits:
        raise ValueError
    return value
