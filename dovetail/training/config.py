"""A run's `config.json`: everything needed to repeat the run or to resume it."""

import dataclasses
import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dovetail.algorithm import Algorithm
from dovetail.algorithms import ALGORITHMS
from dovetail.envs.resolve import Env
from dovetail.envs.wrapping import rooted
from dovetail.errors import UserError, nearest
from dovetail.loading import load_object, place_of, reference
from dovetail.run.legacy import with_present_options
from dovetail.run.settings import Settings
from dovetail.strategies import STRATEGIES
from dovetail.strategies.interface import Strategy
from dovetail.training.trust import code_of, refuse_untrusted

NAMED = re.compile(r"(/[^=,?&]*?\.py):(\w+)")
"""A class in a file, by its absolute path."""

PACKAGES = ("dovetail", "jax", "jaxlib", "numpy", "optax", "gymnasium", "gymnax")
PLAIN = (bool, int, float, str, tuple, list, dict)
"""The types of options that JSON knows."""


def describe(
    algorithm: Algorithm,
    env: Any,
    resolved: Env,
    strategy: Strategy,
    *,
    steps: int,
    seed: int,
    settings: Settings,
) -> dict[str, Any]:
    """The config of a run. `env` is the user's argument; of an object only the id is stored."""
    return {
        "algorithm": name_of(algorithm, ALGORITHMS),
        "options": {name: _rooted(value) for name, value in options_of(algorithm).items()},
        "env": rooted(env) if isinstance(env, str) else resolved.spec.id,
        "env_id": resolved.spec.id,
        "env_given": "id" if isinstance(env, str) else "object",
        "threshold": settings.until if settings.until is not None else resolved.spec.threshold,
        "strategy": name_of(strategy, STRATEGIES),
        "strategy_options": options_of(strategy),
        "seed": seed,
        "steps": steps,
        "settings": dataclasses.asdict(settings),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _rooted(value: Any) -> Any:
    """An option that names a class in a file, such as a network, with the file's absolute path."""
    path, colon, name = value.partition(".py:") if isinstance(value, str) else ("", "", "")
    file = Path(f"{path}.py").expanduser()
    return f"{file.resolve()}:{name}" if colon and file.is_file() else value


def options_of(thing: Any) -> dict[str, Any]:
    """The fields of a dataclass. Tuples become lists in JSON; `rebuild` converts them back. A class
    or an object, such as a network, becomes the reference by which it is found again."""
    values = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    return {
        name: value if value is None or isinstance(value, PLAIN) else reference(value)
        for name, value in values.items()
    }


def name_of(thing: Any, known: dict[str, str]) -> str:
    """The short name of a class in `known`; file.py:Name of any other class."""
    kind = type(thing)
    for name, target in known.items():
        if target == f"{kind.__module__}:{kind.__qualname__}":
            return name
    return place_of(kind)


def rebuild(name: str, options: dict[str, Any], known: dict[str, str], what: str) -> Any:
    """Builds the algorithm or strategy of a config from its name and options."""
    try:
        kind = load_object(known.get(name, name), what)
    except UserError:  # a class in memory needs no file
        refuse_missing(name, what)
        raise
    return _built(kind, name, options, what)


def _built(kind: Any, name: str, options: dict[str, Any], what: str) -> Any:
    fields = {field.name for field in dataclasses.fields(kind)}
    options = with_present_options(options, fields)
    unknown = next((key for key in options if key not in fields), None)
    if unknown is not None:
        raise UserError(f"{what} {name} has no option {unknown!r}: {nearest(unknown, fields)}")
    return kind(**_tuples(options))


def refuse_missing(target: str, what: str) -> None:
    """Raises if a config's algorithm, env or strategy names a class in a file that is not there."""
    for found in NAMED.finditer(target):
        path, name = found.groups()
        if os.path.isfile(path):
            continue
        give = f"give its new place with --{what} {target.replace(path, os.path.basename(path))}"
        if what == "strategy":
            give = "put it back"
        raise UserError(f"The run's {what} names {name} in {path}, but that is not there: {give}.")


def _tuples(options: dict[str, Any]) -> dict[str, Any]:
    """Converts JSON's lists to the tuples that options have."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}


def rebuild_all(
    config: dict[str, Any],
    algorithm: type | str | None = None,
    trust: bool = False,
    env: Any = None,
) -> tuple[Algorithm, Strategy, Settings]:
    """Builds the algorithm, strategy and settings of a config.

    `algorithm` is the class, or "file.py:Name", where the config's is no longer found. Raises if
    the config names code that the user neither named before nor trusts now; what `algorithm` and
    `env` replace does not count.
    """
    refuse_untrusted(code_of(config, env is None, algorithm is None), trust)
    try:
        for name, kind in (("env", str), ("steps", int), ("seed", int)):
            if not isinstance(config[name], kind):
                raise TypeError(f"{name} is {config[name]!r}")
        name = config["algorithm"]
        if isinstance(algorithm, type):
            made = _built(algorithm, algorithm.__name__, config["options"], "algorithm")
        else:
            made = rebuild(algorithm or name, config["options"], ALGORITHMS, "algorithm")
        return made, rebuild_strategy(config), Settings(**_tuples(config["settings"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"config.json cannot be read ({error}): it was changed by hand or written by another "
            f"version of Dovetail; start a new run."
        ) from error


def rebuild_strategy(config: dict[str, Any]) -> Strategy:
    """Builds the strategy of a config."""
    return rebuild(config["strategy"], config["strategy_options"], STRATEGIES, "strategy")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
