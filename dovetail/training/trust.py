"""Files are data: code that a file names runs only if the user has named or trusted it.

A run's config.json or a dataset's metadata may name code, as `file.py:Name` or `module:Name`. What
the user gave to `train` on this machine is remembered, in a folder that only the user can write.
What comes from elsewhere is refused until the user says `--trust`; its file is then remembered with
its digest, so that a change is noticed.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dovetail.algorithms import ALGORITHMS
from dovetail.envs.names import parse
from dovetail.errors import UserError
from dovetail.run.folder import write_atomically
from dovetail.strategies import STRATEGIES

_CODE = re.compile(r"((?:[\w.]+|[^?&]*\.py):[A-Za-z_]\w*)(?::.*)?")
"""A name of code, module:Name or file.py:Name, perhaps with arguments behind it."""


def code_of(config: Mapping[str, Any], env: bool = True, algorithm: bool = True) -> list[str]:
    """The code that a run's config names; without that of its environment unless `env`, and of its
    algorithm unless `algorithm`."""
    found: list[str] = []
    for what, known in (("algorithm", ALGORITHMS), ("strategy", STRATEGIES)):
        name = config.get(what) if algorithm or what == "strategy" else None
        if isinstance(name, str) and name not in known and name not in known.values():
            found.append(name)
        options = config.get("options" if what == "algorithm" else "strategy_options")
        found += _code_in(options)
    found += _code_in(config.get("callback"))
    named = config.get("env")
    if env and isinstance(named, str) and config.get("env_given", "id") == "id":
        found += code_of_env(named)
    return found


def code_of_env(env: str) -> list[str]:
    """The code that an environment's id names."""
    found = parse(env)
    named = [f"{found.path}:{found.name}"] if found.backend == "file" else []
    if found.backend in (None, "gymnasium") and ":" in found.name:  # Gymnasium's module:Name-v0
        named.append(found.name)
    return named + _code_in(found.options)


def remember(code: Iterable[str]) -> None:
    """Remembers code that the user named: it may change in its place, and move as it is."""
    for one in code:
        _note(one, None)
        if _digest(one):
            _note(f"{_digest(one)}:", None)


def untrusted(code: Iterable[str]) -> str | None:
    """Why the first of these that may not run may not; None if all may."""
    for one in code:
        noted = _noted(one)
        if noted is None and _digest(one) and _noted(f"{_digest(one)}:") is not None:
            continue  # a copy of a file that the user named
        if noted is None:
            return f"names code of its own, {one}"
        if noted["digest"] is not None and noted["digest"] != _digest(one):
            return f"names {one}, which has changed since you trusted it"
    return None


def refuse_untrusted(code: list[str], trust: bool) -> None:
    """Raises if a config names code that the user neither named nor trusts; `trust` accepts it."""
    if trust:
        for one in code:
            if _noted(one) is None or untrusted([one]) is not None:
                _note(one, _digest(one))
        return
    why = untrusted(code)
    if why is not None:
        raise UserError(
            f"The run's config.json {why}: look at it, and add --trust (in Python, trust=True) if "
            "it may run."
        )


def _code_in(options: Any) -> list[str]:
    """The names of code among options: networks, wrappers."""
    return [match[1] for text in _texts(options) if (match := _CODE.fullmatch(text))]


def _texts(value: Any) -> Iterator[str]:
    """All strings in options."""
    if isinstance(value, str):
        yield from value.split(",")
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def _place(code: str) -> str:
    """Code by the file that it would come from, which the same name need not mean elsewhere."""
    where, _, name = code.rpartition(":")
    if where.endswith(".py"):
        return f"{Path(where).expanduser().resolve()}:{name}"
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec(where.partition(".")[0])  # imports nothing
        return f"{found.origin if found else ''}:{where}:{name}"
    return f":{where}:{name}"


def _digest(code: str) -> str:
    """The digest of a named file; empty for a module or where there is no file."""
    where = Path(code.rpartition(":")[0]).expanduser()
    try:
        return hashlib.sha256(where.read_bytes()).hexdigest() if where.suffix == ".py" else ""
    except OSError:
        return ""


def _folder() -> Path:
    root = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(root) / "dovetail" / "trusted"


def _file(code: str) -> Path:
    return _folder() / hashlib.sha256(_place(code).encode()).hexdigest()[:32]


def _note(code: str, digest: str | None) -> None:
    """Remembers code; where that cannot be written, `--trust` is needed every time."""
    with contextlib.suppress(OSError, UserError, RuntimeError):
        _folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(_folder(), 0o700)
        write_atomically(_file(code), json.dumps({"code": _place(code), "digest": digest}))


def _noted(code: str) -> dict[str, Any] | None:
    try:
        found = json.loads(_file(code).read_text())
        return found if found["code"] == _place(code) and "digest" in found else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, RuntimeError):
        return None
