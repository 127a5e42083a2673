"""A run: the directory that holds all output of one training.

`Run.create` makes it, `Run.open` opens an existing one. Its files have plain formats (JSON, CSV,
text, PNG). Each is replaced atomically, so that other programs can read a run while it is training.
"""

import contextlib
import csv
import errno
import json
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from dovetail.errors import UserError, nearest
from dovetail.run.legacy import (
    with_present_config,
    with_present_copies,
    with_present_keys,
)
from dovetail.run.places import located, with_files

ROOT = Path("runs")
"""The default parent of run folders."""


class Run:
    """The directory of a run, as returned by `dovetail.train`: `run.summary["final_return"]`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    @classmethod
    def create(cls, folder: str | None, name: str, config: Mapping[str, Any]) -> Self:
        """Creates a run with its config.json, in `folder` or in runs/<name>-<time>."""
        run = cls(_new_folder(folder, name))
        run.write_config(config)
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Opens the run at `path`; raises if there is none."""
        folder = Path(path)
        if not folder.exists():
            hint = _other_runs(folder.name, folder.parent)
            raise UserError(f"There is no run at {folder}: {hint}")
        if not folder.is_dir():
            raise UserError(
                f"{folder} is a file, but a run is a folder: give the folder, for instance "
                f"{folder.parent}."
            )
        if not (folder / "config.json").is_file():
            hint = _other_runs(folder.name, folder, folder.parent)
            raise UserError(f"{folder} is not a run, it has no config.json: {hint}")
        return cls(folder)

    @property
    def path(self) -> Path:
        """The directory."""
        return self._path

    @property
    def config(self) -> dict[str, Any]:
        """The inputs of the run: algorithm, options, env, strategy, seed, steps, settings.

        Files that it names are those of today, if the run or they have moved.
        """
        return located(with_present_config(self._read_json("config.json")), self.path)

    @property
    def summary(self) -> dict[str, Any]:
        """The results of the run: returns, speeds, times. Empty until the run has finished."""
        return with_present_keys(self._read_json("summary.json"))

    @property
    def copies(self) -> dict[str, int]:
        """Number of copies of each side in the run's plan."""
        try:
            found = with_present_copies(self._read_json("plan.json")).get("copies", {})
            return {str(side): int(count) for side, count in found.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{self.path / 'plan.json'} is damaged ({error}).") from error

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """The columns of metrics.csv as float64 arrays; NaN where a row has no value."""
        return read_metrics(self.path / "metrics.csv")

    def write_config(self, config: Mapping[str, Any]) -> Path:
        """Writes config.json, with the places of the files that it names relative to the run."""
        return self.write_json("config.json", with_files(_plain(config), self.path))

    def write_text(self, name: str, text: str) -> Path:
        """Writes a file of the run atomically; returns its path."""
        path = self.path / name
        write_atomically(path, text)
        return path

    def write_json(self, name: str, obj: object) -> Path:
        """Writes `obj` as strict JSON: dataclasses as objects, NaN and infinities as null."""
        text = json.dumps(_plain(obj), indent=2, allow_nan=False, ensure_ascii=False)
        return self.write_text(name, text + "\n")

    def sweep(self) -> None:
        """Removes what a killed writer left: files that were not complete."""
        for left in self.path.glob(".*.*-*"):
            if re.fullmatch(r"\..+\.\d+-\d+", left.name):
                left.unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def __str__(self) -> str:
        config, summary = self.config, self.summary
        what = " · ".join(str(config[k]) for k in ("algorithm", "env", "strategy") if config.get(k))
        parts = [f"run {self.path}" + (f": {what}" if what else "")]
        if not summary:
            parts.append("not finished")
        if (steps := summary.get("env_steps")) is not None:
            parts.append(f"{steps:,.0f} steps")
        if (wall := summary.get("wall_s")) is not None:
            parts.append(f"{wall:.1f} s")
        if (final := summary.get("final_return")) is not None:
            parts.append(f"final return {final:.4g}")
        return ", ".join(parts)

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise UserError(f"Cannot read {path}: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is not valid JSON ({error}): the run is damaged.") from error
        if not isinstance(found, dict):
            raise UserError(f"{path} holds no JSON object: the run is damaged.")
        return found


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces the file at `path` atomically: a reader sees the old or the new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # before the rename: a crash must not leave an empty file
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise write_error(path, error) from error


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk; does nothing except on POSIX."""
    if os.name != "posix":  # Windows cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_error(path: Path, error: OSError) -> UserError:
    """The `UserError` for a path that cannot be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "free some space there, or " if full else ""
    return UserError(
        f"Cannot write {path} ({error.strerror or error}): {remedy}choose a folder that can be "
        "written."
    )


def read_metrics(path: Path) -> dict[str, np.ndarray]:
    """The columns of a metrics.csv; an incomplete last line, still being written, is skipped."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    header, *rows = list(csv.reader(text[: text.rfind("\n") + 1].splitlines())) or [[]]
    table = np.full((len(rows), len(header)), np.nan)
    for line, row in enumerate(rows):
        try:
            cells = row[: len(header)]
            table[line, : len(cells)] = [float(cell) if cell else np.nan for cell in cells]
        except ValueError as error:
            raise UserError(
                f"{path}, line {line + 2}, holds no row of numbers ({error}): mend or remove it."
            ) from error
    return {name: table[:, column] for column, name in enumerate(header)}


def make_new(folder: Path, what: str, otherwise: str = "") -> None:
    """Creates the folder of a new run or dataset; raises if it is not empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(
                f"The folder {folder} is not empty, and a {what} never overwrites anything: "
                f"choose another folder{otherwise}."
            )
    except FileExistsError as error:
        raise UserError(f"{folder} is a file: choose a folder for the {what}.") from error
    except OSError as error:
        raise write_error(folder, error) from error


def _new_folder(folder: str | None, name: str) -> Path:
    """Creates the folder of a run; raises if it is not empty."""
    if folder is not None:
        path = Path(folder)
        make_new(path, "run", ", or resume the run that is there")
        return path
    stem = f"{_file_name(name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1, 1000):
        path = ROOT / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise write_error(path, error) from error
    raise UserError(f"{ROOT} already holds a thousand runs named {stem}: choose a folder.")


def _file_name(name: str) -> str:
    """Replaces characters that file systems or shells treat specially: "a:b?c=1" → "a-b-c-1"."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:150] or "run"


def _other_runs(word: str, *roots: Path) -> str:
    """A hint for a folder that is not a run, as the end of a sentence: the run with the closest
    name, or the newest ones."""
    for root in (*roots, ROOT):
        names = [config.parent.name for config in root.glob("*/config.json")]
        if not names:
            continue
        hint = nearest(word, names)
        if hint.startswith("choose"):
            newest = sorted(names, key=lambda name: (root / name).stat().st_mtime, reverse=True)
            hint = f"the newest runs are {', '.join(newest[:5])}."
        return f"in {root}, {hint}"
    return "give a folder that a training made."


def _plain(obj: object) -> Any:
    """Converts `obj` to JSON's own types; other objects become their text."""
    if is_dataclass(obj) and not isinstance(obj, type):
        return _plain(asdict(obj))
    if isinstance(obj, Mapping):
        return {str(key): _plain(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple | set | frozenset):
        return [_plain(item) for item in obj]
    if hasattr(obj, "__array__"):
        return _plain(np.asarray(obj).tolist())
    if isinstance(obj, float):
        return obj if np.isfinite(obj) else None
    return obj if obj is None or isinstance(obj, bool | int | str) else str(obj)
