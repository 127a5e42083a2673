"""Loads a class or object from a string: "module:Name" or "path/to/file.py:Name"."""

import hashlib
import importlib
import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from dovetail.errors import UserError, nearest

USER_MODULE = "dovetail_user_"
"""Prefix of the module names of loaded files. Other processes cannot import these names."""


def load_object(target: str, what: str) -> Any:
    """Returns the object that `target` names; `what` is its kind in error messages."""
    place, colon, name = target.rpartition(":")
    if not colon or not name:
        raise UserError(f"{target!r} names no {what}: write file.py:Name.")
    module = load_file(Path(place).resolve()) if place.endswith(".py") else _module(place, what)
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise UserError(f"{place} has no {what} {name!r}: {nearest(name, public)}")
    return getattr(module, name)


def call_named(path: str, name: str, **options: Any) -> Any:
    """Calls `name` in the file at `path`.

    Unlike the loaded function, a partial of this one can be pickled for another process.
    """
    return load_object(f"{path}:{name}", "environment")(**options)


def load_file(path: Path) -> ModuleType:
    """Loads a user's Python file as a module; adds its folder to `sys.path`."""
    if not path.is_file():
        raise UserError(f"There is no file {path}: check the path.")
    return _load(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=32)
def _load(path: Path, changed: int) -> ModuleType:
    """Runs the file once per modification time; `changed` is only part of the cache key."""
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(f"{USER_MODULE}{path.stem}_{digest}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file: give one that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # before it runs: dataclasses look their module up there
    if str(path.parent) not in sys.path:  # appended, so that it shadows no installed package
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as error:
        del sys.modules[spec.name]
        where = _line_in(error, path)
        raise UserError(
            f"{path}{where} cannot be loaded: {type(error).__name__}: {error}."
        ) from error
    return module


def _module(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"The module {name!r} for the {what} cannot be loaded: {error}.") from error


def _line_in(error: BaseException, path: Path) -> str:
    """`:line` of the deepest frame in the user's file; empty if there is none."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f":{error.lineno}"
    line = ""
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == str(path):
            line = f":{frame.tb_lineno}"
        frame = frame.tb_next
    return line
