"""Loads a class or object from a string: "module:Name" or "path/to/file.py:Name"."""

import hashlib
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

from dovetail.errors import UserError, nearest

USER_MODULE = "dovetail_user_"
"""Prefix of the module names of loaded files. Other processes cannot import these names."""

UNGUARDED = 77
"""Exit code of a process that was about to start what its parent runs, while it imported the main
module."""

_remembered: WeakValueDictionary[str, type] = WeakValueDictionary()
"""The classes that runs of this process use, by the names under which runs record them."""
_loading: dict[Path, ModuleType] = {}
"""The users' files that are being loaded."""

IN_MEMORY = "python:"
"""Prefix of the references to objects that only this process knows."""

_objects: dict[str, Any] = {}
"""Objects given in Python, by their references."""


def load_object(target: str, what: str) -> Any:
    """Returns the object that `target` names; `what` is its kind in error messages.

    Of a class that this process has used or imported already, that very class is returned, and
    nothing runs again.
    """
    if (known := _remembered.get(target)) is not None:
        return known
    place, colon, name = target.rpartition(":")
    if not colon or not name:
        raise UserError(f"{target!r} names no {what}: write file.py:Name.")
    if target in _objects:
        return _objects[target]
    if target.startswith(IN_MEMORY):
        raise UserError(
            f"The {what} {name!r} was a Python object of another process: put it into a file and "
            f"name it file.py:{name}, so that the run can be used elsewhere."
        )
    if place.endswith(".py"):
        file = Path(place).resolve()
        module = _imported(file) or load_file(file)
    else:
        module = _module(place, what)
    if not hasattr(module, name) and place == "__main__":
        raise UserError(
            f"The {what} {name} was defined in a notebook or on standard input: define it again "
            "here, or move it to a file and train with that."
        )
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise UserError(f"{place} has no {what} {name!r}: {nearest(name, public)}")
    return getattr(module, name)


def place_of(kind: type) -> str:
    """`file.py:Name` of a class, or `module:Name` without a file, as in a notebook or in a script
    from standard input; `load_object` returns the class for it."""
    try:
        place = f"{Path(inspect.getfile(kind)).resolve()}:{kind.__qualname__}"
    except (OSError, TypeError):
        place = f"{kind.__module__}:{kind.__qualname__}"
    if not kind.__module__.startswith(USER_MODULE):  # those are loaded again when they change
        _remembered[place] = kind
    return place


def _imported(path: Path) -> ModuleType | None:
    """The module that Python itself has loaded from a file, be it the running script."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or name.startswith(USER_MODULE) or os.path.basename(file) != path.name:
            continue
        if Path(file).resolve() == path:
            return module
    return None


def refuse_while_loading(call: str) -> None:
    """Raises if a user's file is being loaded for its classes: what it calls then would run once
    for every load. A process that imports the main module, to find classes in it, exits."""
    leave_if_unguarded()
    for file in _loading:
        raise UserError(
            f"{file} calls {call} when it is loaded for its classes: put the call under "
            '`if __name__ == "__main__":`.'
        )


def leave_if_unguarded() -> None:
    """Exits a process of Dovetail whose main module, when imported, starts what its parent runs."""
    me = multiprocessing.current_process()
    if me.name.startswith("dovetail-") and getattr(me, "_inheriting", False):
        os._exit(UNGUARDED)


def main_file() -> str | None:
    """The file of the main module, from which other processes can import it; None in a notebook and
    for a script from standard input."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return file if file and os.path.isfile(file) else None


def unguarded(what: str) -> UserError:
    """The error for a process that ended with `UNGUARDED`."""
    return UserError(
        f"{what} is defined in {main_file()}, which its processes import, and which starts them "
        'when it is imported: put what it does under `if __name__ == "__main__":`.'
    )


def reference(thing: Any) -> str:
    """The reference by which `load_object` finds a class, function or object again.

    It is "module:Name", "file.py:Name" for one from a script or a loaded file, or "python:Name" for
    one that only this process has: a lambda, an instance, a class in a function or a notebook.
    """
    name = getattr(thing, "__qualname__", "")
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    if module is None or not name.isidentifier() or getattr(module, name, None) is not thing:
        return _in_memory(name or type(thing).__name__, thing)
    if module.__name__ != "__main__" and not module.__name__.startswith(USER_MODULE):
        return f"{module.__name__}:{name}"
    file = getattr(module, "__file__", None) or ""
    return f"{Path(file).resolve()}:{name}" if os.path.isfile(file) else _in_memory(name, thing)


def _in_memory(name: str, thing: Any) -> str:
    """Stores `thing` under its name, with a number if another object has that."""
    base = found = IN_MEMORY + re.sub(r"\W+", "_", name).strip("_")
    number = 1
    while _objects.setdefault(found, thing) is not thing:
        number += 1
        found = f"{base}_{number}"
    return found


def keep(objects: Mapping[str, Any]) -> None:
    """Stores objects that another process sent, by their references."""
    _objects.update(objects)


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
    _loading[path] = module
    try:
        spec.loader.exec_module(module)
    except UserError:
        del sys.modules[spec.name]
        raise
    except Exception as error:
        del sys.modules[spec.name]
        where = _line_in(error, path)
        raise UserError(
            f"{path}{where} cannot be loaded: {type(error).__name__}: {error}."
        ) from error
    finally:
        del _loading[path]
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
