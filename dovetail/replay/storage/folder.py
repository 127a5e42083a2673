"""The files of a durable table: logs, snapshots, mapped rows and the epoch, by name and number.

Every log and snapshot starts with the options that the folder is bound to, and the number of the
file with its rows.
"""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dovetail.errors import UserError
from dovetail.locking import FolderLock
from dovetail.replay.host.table import HostTable
from dovetail.replay.limiter import RateLimiter
from dovetail.replay.storage.records import Reading, StoredRecord
from dovetail.replay.storage.tail import TAIL_NAME

FORMAT = 4


class Folder:
    """The folder of a table and limiter, created if missing."""

    def __init__(self, path: Path, table: HostTable, limiter: RateLimiter) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{path} could not be made ({error.strerror or error}): give another folder."
            ) from error
        self.lock = FolderLock(path, "replay folder")
        self.where = path
        self.options = json.loads(json.dumps(describe(table, limiter)))

    def path(self, kind: str, number: int) -> Path:
        """Path of a file."""
        return self.where / f"{kind}-{number:08d}"

    def part(self, kind: str) -> Path:
        """Path of a file while it is being written."""
        path = self.where / f"{kind}.part"
        path.unlink(missing_ok=True)
        return path

    @property
    def tail(self) -> Path:
        """Path of the file with the newest records."""
        return self.where / TAIL_NAME

    def files(self, kind: str) -> list[Path]:
        """All files of a kind, in order."""
        return sorted(self.where.glob(f"{kind}-" + "[0-9]" * 8))

    def rows_number(self) -> int:
        """Number of the file with the rows that will be restored."""
        for path in [*self.files("snapshot")[-1:], *self.files("log")[:1]]:
            for record in Reading(path):
                return int(said(record).get("rows", 0))
        return 0

    def remove_before(self, number: int, rows: int) -> None:
        """Removes files that a snapshot has superseded."""
        for path in self.files("snapshot") + self.files("log"):
            if number_of(path) < number:
                path.unlink()
        self.remove_other_rows(rows)

    def remove_other_rows(self, rows: int) -> None:
        """Removes all files of rows except one."""
        for path in self.files("rows"):
            if number_of(path) != rows:
                path.unlink()

    def compare(self, record: StoredRecord, path: Path) -> None:
        """Raises if a file was made with different options."""
        found = said(record).get("options", {})
        version = found.get("format") if isinstance(found, dict) else None
        if isinstance(version, int) and version > FORMAT:
            raise UserError(
                f"{path} was written by a newer version of Dovetail (format {version}; this one "
                f"reads {FORMAT}): use that version, or give another folder."
            )
        if found != self.options:
            difference = first_difference(found, self.options)
            raise UserError(
                f"{path} belongs to a replay table of other options ({difference}): "
                "give the options it was made with, or another folder."
            )

    def read_epoch(self) -> int:
        """The number of the last epoch; 0 if there was none."""
        try:
            return int(json.loads((self.where / "epoch.json").read_text())["epoch"])
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return int(time.time())  # damaged: later than every epoch before

    def write_epoch(self, epoch: int) -> None:
        """Stores the number of an epoch."""
        temporary = self.part("epoch")
        temporary.write_text(json.dumps({"epoch": epoch}))
        os.replace(temporary, self.where / "epoch.json")


def number_of(path: Path) -> int:
    """The number of a file."""
    return int(path.name.rpartition("-")[2])


def told(what: dict[str, Any]) -> bytes:
    """The head of a record that is not an operation on the table."""
    return json.dumps(what).encode()


def said(record: StoredRecord) -> dict[str, Any]:
    """The contents of such a head; empty for other records."""
    try:
        return dict(json.loads(record.head))
    except (ValueError, TypeError):
        return {}


def describe(table: HostTable, limiter: RateLimiter) -> dict[str, Any]:
    """The options that a folder is bound to."""
    limits = asdict(limiter)
    return {
        "format": FORMAT,
        "table": repr(table.table),
        "envs": table.layout.envs,
        "rows": [[leaf.path, str(leaf)] for leaf in table.leaves],
        "limits": {name: limits[name] for name in ("min_size", "samples_per_insert", "tolerance")},
    }


def first_difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The first option that differs, for messages."""
    names = [name for name in wanted if found.get(name) != wanted[name]]
    return f"{names[0]} {found.get(names[0])}, not {wanted[names[0]]}"
