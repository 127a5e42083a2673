"""The user's files that a run's config names, found again after the run or the files have moved.

A config names them by absolute paths: of an algorithm or environment as "file.py:Name", of a
dataset as its folder. Beside them it holds `files`, which maps each path to the same place relative
to the run's folder. A path that no longer exists is replaced by that place, if it exists there.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILES = "files"
"""The key of the map in a config."""
FILE = re.compile(r"/[^=,?&]*?\.py(?=:)")
"""The absolute path of a file in "/a/file.py:Name", also among an environment's options."""


def with_files(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The config with its map of files, for a run in `folder`."""
    home = folder.resolve()
    found = {path for text in _texts(without_files(config)) for path in _paths(text)}
    files = {path: Path(os.path.relpath(path, home)).as_posix() for path in sorted(found)}
    return {**without_files(config), **({FILES: files} if files else {})}


def without_files(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without its map of files."""
    return {key: value for key, value in config.items() if key != FILES}


def located(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The config of a run in `folder`, with the present places of the files that have moved."""
    files = config.get(FILES)
    moved: dict[str, str] = {}
    for path, relative in files.items() if isinstance(files, dict) else ():
        if not isinstance(path, str) or not isinstance(relative, str) or os.path.exists(path):
            continue
        place = os.path.normpath(folder.resolve() / relative)
        if os.path.exists(place):
            moved[path] = place
    return {**config, **_replaced(without_files(config), moved)} if moved else dict(config)


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        for part in tree.values():
            yield from _texts(part)
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _texts(part)


def _paths(text: str) -> list[str]:
    """The existing files and folders that a text of a config names by their absolute paths."""
    paths = [text] if os.path.isabs(text) else []
    return [path for path in [*paths, *FILE.findall(text)] if os.path.exists(path)]


def _replaced(tree: Any, moved: Mapping[str, str]) -> Any:
    if isinstance(tree, str):
        return FILE.sub(lambda path: moved.get(path[0], path[0]), moved.get(tree, tree))
    if isinstance(tree, Mapping):
        return {key: _replaced(part, moved) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        return [_replaced(part, moved) for part in tree]
    return tree
