"""What a durable replay service keeps in a folder: snapshots, and a log of all that came after.

Every insert, sample and change of priorities is appended to the log before it is acknowledged;
doing them again in order leads to the same table, priorities and counts, because a table has no
chance of its own. What was appended survives the process, killed or not (not a machine that loses
power: the log is not forced to the disk). When the log has grown, the table is copied, a new log
begins, and the copy is written beside it while the service goes on.
"""

import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dovetail.errors import UserError
from dovetail.replay.host import HostTable
from dovetail.replay.leaves import path_name
from dovetail.replay.limiter import RateLimiter
from dovetail.replay.records import Reading, Record, RecordFile
from dovetail.replay.sample import Keys
from dovetail.replay.saving import load, save

Array = np.ndarray[Any, np.dtype[Any]]

FORMAT = 1
PIECE = 1 << 28
"""Bytes of an array that go into one record of a snapshot."""


@dataclass(frozen=True)
class Restored:
    """How a journal was found."""

    records: int
    """Records of the log that were done again."""
    lost: str | None
    """What was acknowledged and is lost; None if nothing is."""
    epoch: int
    """Grows when data were lost: clients that know another number must not rely on theirs."""


class Journal:
    """The folder of one durable table; a log larger than `grown` bytes leads to a snapshot."""

    def __init__(self, folder: Path, table: HostTable, limiter: RateLimiter, grown: int) -> None:
        self._folder, self._table, self._limiter, self._grown = folder, table, limiter, grown
        folder.mkdir(parents=True, exist_ok=True)
        self._options = json.dumps(describe(table, limiter))
        self._writer: threading.Thread | None = None
        self.restored = self._restore()

    def insert(self, rows: Any, others: dict[str, Any], envs: tuple[int, int] | None) -> None:
        """Logs an insert: its rows, and the other arguments that are not None."""
        arrays = {f"rows/{at}": x for at, x in enumerate(jax.tree.leaves(rows))}
        final = others.pop("final")
        header: tuple[tuple[str, Any], ...] = (("do", "insert"), ("envs", envs))
        if final is not None:
            arrays |= {f"final/{at}": x for at, x in enumerate(jax.tree.leaves(final))}
            header += (("final", final_names(final)),)
        arrays |= {name: x for name, x in others.items() if x is not None}
        self._append(header, arrays)

    def sample(self, draws: Array) -> None:
        """Logs a sample."""
        self._append((("do", "sample"),), {"draws": draws})

    def update(self, keys: Keys, priorities: Array) -> None:
        """Logs a change of priorities."""
        arrays = {"slot": keys.slot, "number": keys.number, "priorities": priorities}
        self._append((("do", "update"),), {name: np.asarray(x) for name, x in arrays.items()})

    def _append(self, header: tuple[tuple[str, Any], ...], arrays: dict[str, Array]) -> None:
        self._log.append(header, arrays)
        if self._log.size > self._grown and (self._writer is None or not self._writer.is_alive()):
            self.snapshot()

    def snapshot(self) -> None:
        """Copies the table and begins a new log; the copy is written meanwhile."""
        self._wait()
        state = save(self._table)
        counts = (self._limiter.inserted, self._limiter.sampled)
        self._number += 1
        self._log.close()
        self._log = self._open(self._number)
        self._writer = threading.Thread(
            target=self._write_snapshot, args=(self._number, state, counts), daemon=True
        )
        self._writer.start()

    def close(self) -> None:
        """Waits for a snapshot under way and closes the log."""
        self._wait()
        self._log.close()

    def _wait(self) -> None:
        if self._writer is not None:
            self._writer.join()

    def _open(self, number: int) -> RecordFile:
        log = RecordFile(self._path("log", number))
        if log.size == 0:
            log.append((("options", self._options),), {})
        return log

    def _path(self, kind: str, number: int) -> Path:
        return self._folder / f"{kind}-{number:08d}"

    def _write_snapshot(
        self, number: int, state: dict[str, Array], counts: tuple[int, int]
    ) -> None:
        temporary = self._folder / "snapshot.part"
        temporary.unlink(missing_ok=True)
        file = RecordFile(temporary)
        file.append((("options", self._options), ("counts", counts)), {})
        for name, array in state.items():
            flat = array.reshape(-1)
            step = max(PIECE // max(array.itemsize, 1), 1)
            for start in range(0, max(flat.size, 1), step):
                shape = (("name", name), ("shape", array.shape))
                file.append(shape, {"piece": flat[start : start + step]})
        file.append((("end", True),), {})
        file.sync()
        file.close()
        os.replace(temporary, self._path("snapshot", number))
        for path in self._files("snapshot") + self._files("log"):
            if int(path.name.rpartition("-")[2]) < number:
                path.unlink()

    def _files(self, kind: str) -> list[Path]:
        return sorted(self._folder.glob(f"{kind}-" + "[0-9]" * 8))

    def _restore(self) -> Restored:
        """Brings the table to where the folder's last acknowledged record left it."""
        lost: str | None = None
        records = 0
        snapshots, logs = self._files("snapshot"), self._files("log")
        self._epoch = self._read_epoch()
        fresh = not snapshots and not logs
        first = 0
        if snapshots:
            first = int(snapshots[-1].name.rpartition("-")[2])
            lost = self._load_snapshot(snapshots[-1])
        self._number = max([first, *(int(path.name.rpartition("-")[2]) for path in logs)])
        for path in logs:
            if lost is None and int(path.name.rpartition("-")[2]) >= first:
                count, lost = self._follow(path, last=path == logs[-1])
                records += count
        if lost is not None or fresh:
            self._epoch += 1
            self._write_epoch()
        self._log = self._open(self._number)
        if lost is not None:
            self.snapshot()  # what follows the damage can never be reached: begin anew
            self._wait()
        return Restored(records, lost, self._epoch)

    def _load_snapshot(self, path: Path) -> str | None:
        """Loads a snapshot; what is lost if it is damaged."""
        reading = Reading(path)
        pieces: dict[str, list[Array]] = {}
        shapes: dict[str, Any] = {}
        counts, ended = [0, 0], False
        for at, record in enumerate(reading):
            if at == 0:
                self._compare(record, path)
                counts = record.header["counts"]
            elif "name" in record.header:
                pieces.setdefault(record.header["name"], []).append(record.arrays["piece"])
                shapes[record.header["name"]] = record.header["shape"]
            ended = "end" in record.header
        if reading.damage or not ended:
            return f"the whole table, as {reading.damage or f'{path.name} has no end'}"
        load(
            self._table,
            {name: np.concatenate(parts).reshape(shapes[name]) for name, parts in pieces.items()},
        )
        self._limiter.inserted, self._limiter.sampled = counts
        return None

    def _follow(self, path: Path, last: bool) -> tuple[int, str | None]:
        """Does again what a log says: how many records, and what is lost if it is damaged."""
        reading = Reading(path)
        count = -1
        for record in reading:
            if count < 0:
                self._compare(record, path)
            else:
                self._redo(record)
            count += 1
        if reading.damage is None:
            return max(count, 0), None
        os.truncate(path, reading.good)
        if reading.cut and last:  # its writer was killed before it could acknowledge
            return max(count, 0), None
        return max(count, 0), f"what came after {max(count, 0)} records, as {reading.damage}"

    def _compare(self, record: Record, path: Path) -> None:
        found = record.header.get("options")
        if found != self._options:
            difference = first_difference(json.loads(found or "{}"), json.loads(self._options))
            raise UserError(
                f"{path} belongs to a replay table of other options ({difference}): "
                "give the options it was made with, or another folder."
            )

    def _redo(self, record: Record) -> None:
        header, arrays = record
        if header["do"] == "sample":
            self._table.sample(arrays["draws"])
            self._limiter.sample(len(arrays["draws"]))
        elif header["do"] == "update":
            keys = Keys(arrays["slot"], arrays["number"])
            self._table.update_priorities(keys, arrays["priorities"])
        else:
            rows = [arrays[f"rows/{at}"] for at in range(len(self._table.leaves))]
            final = {name: arrays[f"final/{at}"] for at, name in enumerate(header.get("final", []))}
            before = self._table.completed
            self._table.insert(
                jax.tree.unflatten(self._table.structure, rows),
                arrays.get("ends"),
                arrays.get("valid"),
                unfolded(final) or None,
                arrays.get("priorities"),
                None if header["envs"] is None else tuple(header["envs"]),
            )
            self._limiter.insert(self._table.completed - before)

    def _read_epoch(self) -> int:
        path = self._folder / "epoch.json"
        return int(json.loads(path.read_text())["epoch"]) if path.exists() else 0

    def _write_epoch(self) -> None:
        temporary = self._folder / "epoch.part"
        temporary.write_text(json.dumps({"epoch": self._epoch}))
        os.replace(temporary, self._folder / "epoch.json")


def final_names(final: Any) -> tuple[str, ...]:
    """The paths of what an episode ended with, which name leaves of the rows."""
    return tuple(path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(final)[0])


def unfolded(final: dict[str, Array]) -> dict[str, Any]:
    """A tree whose leaves have these paths."""
    tree: dict[str, Any] = {}
    for path, array in final.items():
        *folders, name = path.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = array
    return tree


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
    """The first option that differs, in words."""
    names = [name for name in wanted if found.get(name) != wanted[name]]
    return f"{names[0]} {found.get(names[0])}, not {wanted[names[0]]}"
