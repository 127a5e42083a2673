"""The config file of `dovetail train`: TOML whose keys are its flags.

Top-level keys are flags. The tables `[algorithm]`, `[strategy]` and `[settings]` hold options by
their Python names; the first two also hold a `name`. The command line overrides the file.
"""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from dovetail.cli.synonyms import answer, ours
from dovetail.errors import UserError, nearest
from dovetail.run.legacy import KEYS, MOVED, OPTIONS, with_present_keys

TABLES = ("algorithm", "strategy", "settings")


def load(path: str) -> dict[str, object]:
    """Reads the file's values by key: "env", "algorithm", "algorithm.learning_rate", …"""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"Cannot read the config file {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"The config file {path} is not valid TOML: {error}.") from error
    values: dict[str, object] = {}
    for old, new in KEYS.items():
        if old in document and new in document:
            raise UserError(
                f"{path} has both {old!r}, its earlier name, and {new!r}: leave one out."
            )
    for key, value in with_present_keys(document).items():
        if key in TABLES and isinstance(value, Mapping):
            values |= {f"{key}.{_place(name)}": item for name, item in value.items()}
        else:
            values[_place(key)] = value
    for table in ("algorithm", "strategy"):
        if f"{table}.name" in values:
            values[table] = values.pop(f"{table}.name")
    return values


def check(
    path: str, values: Mapping[str, object], flags: Mapping[str, str], known: set[str]
) -> dict[str, object]:
    """Returns the values by the parser's keys; raises on an unknown key, suggesting the closest."""
    checked: dict[str, object] = {}
    for key, value in values.items():
        table, dot, name = key.rpartition(".")
        place = _found(key, flags, known)
        if place is None:
            names = [other.rpartition(".") for other in known]
            near = [last for first, _, last in names if first == table] if dot else _keys(flags)
            where = f"in [{table}]" if dot else "at the top level"
            hint = _hint(name, flags) or nearest(name, near)
            raise UserError(f"{path} has an unknown key {name!r} {where}: {hint}")
        if place in checked:
            one = place.rpartition(".")[2].replace("-", "_")
            raise UserError(f"{path} gives the option {one!r} twice, by two names: leave one out.")
        checked[place] = value
    return checked


def _found(key: str, flags: Mapping[str, str], known: set[str]) -> str | None:
    """The parser's key for a key of the file, by its current or an earlier name."""
    table, dot, name = key.rpartition(".")
    for present in (name, *OPTIONS.get(name, ())):
        for place in (f"{table}{dot}{present}", flags.get("--" + present.replace("_", "-"))):
            if place in known and (not dot or place.startswith(f"{table}.")):
                return place
        if (moved := MOVED.get(f"{table}.{present}")) in known:
            return moved
    return None


def _hint(name: str, flags: Mapping[str, str]) -> str | None:
    """The answer to another library's name of an option, by our key; None if it is not one."""
    known = ours(name, list(flags))
    return None if known is None else answer(name, known).replace(known, repr(_place(known[2:])))


def _keys(flags: Iterable[str]) -> list[str]:
    """The valid top-level keys: all flags and the tables."""
    return [*(_place(flag[2:]) for flag in flags if not flag.startswith("--no-")), *TABLES]


def _place(key: str) -> str:
    return key.replace("-", "_")
