"""Wrappers as data: parses `--wrap`, and wraps single Gymnasium environments.

Wrappers are the option `wrap` of an environment's id, so that whatever gets the id applies them:
`CartPole-v1?wrap=time-limit:200,clip-reward`. One is written `name[:argument[:key=value]]`. Names
are our short ones, those in `gymnasium.wrappers`, `module:Name`, or `file.py:Name`. Environment
processes use this module, so it does not import JAX; Gymnasium is imported when needed.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.envs.names import parse, with_option
from dovetail.errors import UserError, nearest
from dovetail.loading import IN_MEMORY, load_object, reference

if TYPE_CHECKING:
    import gymnasium

SHORT = {
    "clip-reward": "rewards clipped to -1 … 1, or clip-reward:LOW:HIGH",
    "flatten": "the observation as one vector",
    "frame-stack": "frame-stack:4 joins each observation with the three before it",
    "gray": "color images [H, W, 3] as gray ones [H, W]",
    "resize": "resize:84 scales images to 84 × 84, resize:HEIGHT:WIDTH to any size",
    "time-limit": "time-limit:500 truncates episodes after 500 steps",
}
"""Our own names of the most common wrappers, and their meanings; `frames` defines them."""


@dataclass(frozen=True)
class Wrap:
    """One wrapper with its arguments, not yet applied."""

    text: str
    """As written, for messages."""
    name: str
    """A short name, or the reference of a class or function: "module:Name" or "file.py:Name"."""
    make: Any
    """The function of an environment; a reference if other processes can load it by that."""
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def around(self, env: "gymnasium.Env[Any, Any]", env_id: str) -> "gymnasium.Env[Any, Any]":
        """The environment in this wrapper."""
        import gymnasium

        make = load_object(self.make, "wrapper") if isinstance(self.make, str) else self.make
        try:
            made = make(env, *self.args, **dict(self.kwargs))
        except (UserError, gymnasium.error.DependencyNotInstalled):
            raise
        except Exception as error:
            told = f"{type(error).__name__} {str(error).rstrip('.')}".strip()
            raise UserError(
                f"The wrapper {self.text!r} does not fit {env_id.partition('?')[0]} with "
                f"observations {env.observation_space} and actions {env.action_space}: it raised "
                f"{told}."
            ) from error
        if not isinstance(made, gymnasium.Env):
            raise UserError(
                f"The wrapper {self.text!r} returned a {type(made).__name__}, not a gymnasium.Env: "
                "it must take an environment and return one."
            )
        return made


def wrapped(
    build: "Callable[..., gymnasium.Env[Any, Any]]",
    wraps: Iterable[Wrap],
    env_id: str,
    **more: Any,
) -> "gymnasium.Env[Any, Any]":
    """One environment made by `build(**more)`, in its wrappers, the first innermost."""
    env = build(**more)
    try:
        for wrap in wraps:
            env = wrap.around(env, env_id)
    except BaseException:
        with contextlib.suppress(Exception):
            env.close()
        raise
    return env


def parse_wraps(text: object) -> tuple[Wrap, ...]:
    """The wrappers of a comma-separated list; commas in brackets belong to an argument."""
    found = [part.strip() for part in re.split(r",(?![^\[]*\])", str(text))]
    if not all(found):
        raise UserError(f"The wrappers {str(text)!r} have an empty name: write a,b,c.")
    return tuple(_parse_one(part) for part in found)


def split_wraps(options: Mapping[str, Any]) -> tuple[tuple[Wrap, ...], dict[str, Any]]:
    """(the wrappers, the other options) of an id's options."""
    rest = {key: value for key, value in options.items() if key != "wrap"}
    return (parse_wraps(options["wrap"]) if "wrap" in options else ()), rest


@dataclass(frozen=True)
class WrappedObject:
    """An environment given as a Python object, with its wrappers."""

    env: Any
    wrap: str


def with_wraps(env: Any, wraps: str | Iterable[Any]) -> Any:
    """The environment with more wrappers around it: an id, or a `WrappedObject`.

    `wraps` is a text, or a list of texts, wrapper classes, and functions env → env.
    """
    text = wrap_text(wraps)
    if not text:
        return env
    if "&" in text:
        raise UserError(f"The wrappers {text!r} contain '&', which ends an option of an id.")
    if isinstance(env, WrappedObject):
        return WrappedObject(env.env, f"{env.wrap},{text}")
    if not isinstance(env, str):
        return WrappedObject(env, text)
    inner = parse(env).options.get("wrap")
    return with_option(env, "wrap", text if inner is None else f"{inner},{text}")


def relocated(env: Any, place: Callable[[str], str]) -> Any:
    """The environment with every path of a user's file, its own and its wrappers', replaced by
    `place(path)`; an environment given as an object keeps its class."""
    if isinstance(env, WrappedObject):
        return replace(env, wrap=_relocated_text(env.wrap, place))
    if not isinstance(env, str):
        return env
    found = parse(env)
    moved = env if found.backend != "file" else f"{place(found.path)}:{found.name}{found.query}"
    if "wrap" not in found.options:
        return moved
    return with_option(moved, "wrap", _relocated_text(str(found.options["wrap"]), place))


def rooted(env: str) -> str:
    """The id with absolute paths of the user's files."""
    return relocated(env, _absolute)


def files_of(env: Any) -> list[str]:
    """The user's files that an environment's id and its wrappers name."""
    found: list[str] = []

    def collect(path: str) -> str:
        found.append(path)
        return path

    relocated(env, collect)
    return found


def objects_of(env: Any) -> dict[str, Any]:
    """The wrappers that only this process has, by their references."""
    options = parse(env).options if isinstance(env, str) else {}
    text = env.wrap if isinstance(env, WrappedObject) else options.get("wrap")
    wraps = parse_wraps(text) if text is not None else ()
    return {wrap.name: wrap.make for wrap in wraps if wrap.name.startswith(IN_MEMORY)}


def _relocated_text(text: str, place: Callable[[str], str]) -> str:
    return re.sub(r"(?<![^,])([^,:]+\.py)(?=:)", lambda found: place(found[1]), text)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def wrap_text(wraps: str | Iterable[Any]) -> str:
    """The text of wrappers given as a text, or as a list of texts, classes and functions."""
    if isinstance(wraps, str):
        return wraps
    return ",".join(one if isinstance(one, str) else _named(one) for one in wraps)


def _named(wrap: Any) -> str:
    if not callable(wrap):
        raise UserError(
            f"{wrap!r} is no wrapper: give a name, a gymnasium.Wrapper class, or a function that "
            "takes an environment and returns one."
        )
    found = reference(wrap)
    module, _, name = found.rpartition(":")
    return name if module.startswith("gymnasium.wrappers.") and name in _gymnasium() else found


def _parse_one(text: str) -> Wrap:
    name, *rest = text.split(":")
    make: Any
    if name in SHORT:
        make = f"dovetail.envs.frames:{name.replace('-', '_')}"
    elif name in _gymnasium():
        make = f"gymnasium.wrappers:{name}"
    elif rest and rest[0].isidentifier():
        name, rest = f"{name}:{rest[0]}", rest[1:]
        found = load_object(name, "wrapper")
        # A Python object that only this process knows travels itself, if it can be pickled.
        make = found if name.startswith(IN_MEMORY) else _relocated_text(name, _absolute)
    elif name.endswith(".py"):
        raise UserError(f"The wrapper {text!r} is a file: name a class in it, {name}:ClassName.")
    else:
        raise UserError(f"There is no wrapper {name!r}: {_hint(name)}")
    args, kwargs = _arguments(rest)
    return Wrap(text, name, make, args, kwargs)


def _hint(name: str) -> str:
    near = nearest(name, [*SHORT, *_gymnasium()])
    if near.startswith("did"):
        return near
    return f"{nearest(name, SHORT)}, one of Gymnasium's, module:Name or file.py:Name."


def _arguments(texts: Sequence[str]) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """(positional arguments, named ones) of texts like "4" and "gamma=0.99"."""
    args: list[Any] = []
    kwargs: list[tuple[str, Any]] = []
    for text in texts:
        key, equals, value = text.partition("=")
        if equals and key.isidentifier():
            kwargs.append((key, _value(value)))
        else:
            args.append(_value(text))
    return tuple(args), tuple(kwargs)


def _value(text: str) -> Any:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return text
    return tuple(found) if isinstance(found, list) else found


def _gymnasium() -> list[str]:
    """The names of Gymnasium's wrappers."""
    from gymnasium import wrappers

    return [name for name in wrappers.__all__ if name[0].isupper()]
