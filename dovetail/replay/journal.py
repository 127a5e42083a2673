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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import UserError
from dovetail.replay.behind import Behind, Done
from dovetail.replay.form import Spec
from dovetail.replay.host import HostTable
from dovetail.replay.incoming import Plain, Steps
from dovetail.replay.limiter import RateLimiter
from dovetail.replay.messages import (
    PLAIN,
    PRIORITIES,
    PRIORITY,
    InsertHead,
    arrays_of,
    head_of,
    insert_specs,
    plain_of,
    steps_of,
)
from dovetail.replay.records import Reading, Record, RecordFile, Start, start_of
from dovetail.replay.sample import Keys
from dovetail.replay.saving import load, save

Array = np.ndarray[Any, np.dtype[Any]]

FORMAT = 2
INSERT, SAMPLE, UPDATE = b"i", b"s", b"u"
"""How the heads of records begin."""
KNOWN = 256
"""Heads that are kept ready."""
FEW = 1 << 16
"""Bytes of a record up to which writing it takes less time than to let another thread do it."""
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

    def __init__(
        self,
        folder: Path,
        table: HostTable,
        limiter: RateLimiter,
        grown: int,
        behind: bool = False,
    ) -> None:
        """`behind`: large records are written by another thread; see `when_kept`."""
        self._folder, self._table, self._limiter, self._grown = folder, table, limiter, grown
        self._behind = Behind() if behind else None
        folder.mkdir(parents=True, exist_ok=True)
        self._options = json.loads(json.dumps(describe(table, limiter)))
        self._starts: dict[tuple[int, int, int, bool], Start] = {}
        self._kept: list[Done] = []
        self._spare: dict[Any, list[Array]] = {}
        self._stale = False  # whether the log lacks what the table has
        self._writer: threading.Thread | None = None
        self.restored = self._restore()

    def insert(self, steps: Steps | Plain, first: int, last: int) -> None:
        """Logs an insert that the table has just taken; where it can, what was stored of it."""
        written = self._table.streams.written
        if written is None:
            assert isinstance(steps, Steps)
            self._append(INSERT + head_of(steps, first, last).packed(), arrays_of(steps))
            return
        plain, large = written.plain, written.plain.alone
        if plain.frames:
            frames = plain.frames if steps is plain else self._frames(written.newest)
            large = [*large, *frames]
        own = large[len(plain.alone) :] if steps is not plain else None
        block = plain.block
        if large and steps is not plain and self._behind is not None:
            block = block.copy()  # the table's own, which it uses again
        arrays = [block, *large]
        if plain.priorities is not None:
            arrays.append(plain.priorities)
        form = (plain.length, first, last, plain.priorities is not None)
        start = self._starts.get(form)
        if start is None:
            given = PLAIN if plain.priorities is None else PLAIN | PRIORITIES
            start = start_of(INSERT + InsertHead(given, *form[:3], ()).packed(), arrays)
            if len(self._starts) >= KNOWN:
                self._starts.clear()
            self._starts[form] = start
        self._put(start, arrays, own)

    def _frames(self, places: Array | None) -> list[Array]:
        """Copies of stored frames; the memory is used again when they are written."""
        found: list[Array] = []
        for store in self._table.streams.frames.stores:
            assert places is not None
            shape = (places.size, *store.shape[1:])
            kept = self._spare.get((shape, store.dtype))
            out = kept.pop() if kept else np.empty(shape, store.dtype)
            found.append(store.take(places, axis=0, out=out, mode="wrap"))
        return found

    def _give_back(self, frames: list[Array]) -> None:
        for array in frames:
            self._spare.setdefault((array.shape, array.dtype), []).append(array)

    def sample(self, draws: Array) -> None:
        """Logs a sample."""
        self._append(SAMPLE + draws.dtype.str.encode(), [draws])

    def update(self, keys: Keys, priorities: Array) -> None:
        """Logs a change of priorities."""
        whole = np.int64
        numbers = [np.asarray(keys.slot, whole), np.asarray(keys.number, whole)]
        self._append(UPDATE, [*numbers, np.asarray(priorities, PRIORITY)])

    def _append(self, head: bytes, arrays: list[Array]) -> None:
        self._put(start_of(head, arrays), arrays)

    def _put(self, start: Start, arrays: list[Array], frames: list[Array] | None = None) -> None:
        """Logs a record: for the next commit, or by the thread behind if it is large."""
        behind = self._behind
        if self._stale or (behind is not None and behind.failure is not None):
            self._resume()  # which keeps this one too
            return
        if behind is None:
            try:
                self._write(self._log, start, arrays, frames)
            except UserError:
                self._stale = True
                raise
        elif start.length < FEW and behind.idle:
            self._log.put(start, arrays)
            if self._log.waits > FEW:
                self.commit()
        else:
            self.commit()
            behind.write(partial(self._write, self._log, start, arrays, frames))
        self._grew += start.length
        if self._grew > self._grown and (self._writer is None or not self._writer.is_alive()):
            self.snapshot()

    def _write(
        self, log: RecordFile, start: Start, arrays: list[Array], frames: list[Array] | None
    ) -> None:
        log.put(start, arrays)
        log.commit()
        if frames:
            self._give_back(frames)

    def when_kept(self, done: Done) -> None:
        """Calls `done` when all that was logged so far is written, or could not be."""
        if self._behind is not None and not self._behind.idle:
            self._behind.then(done)
        elif self._log.waits:
            self._kept.append(done)
        else:
            done(None)

    def commit(self) -> None:
        """Writes what small records wait, and tells those who wait for them."""
        failure: UserError | None = None
        try:
            self._log.commit()
        except UserError as error:
            self._stale, failure = True, error
        kept, self._kept = self._kept, []
        for done in kept:
            done(failure)

    def _resume(self) -> None:
        """After a record that could not be written: the table as it is now, and a new log."""
        self.snapshot()
        self._wait()
        self._stale = False
        if self._behind is not None:
            self._behind.failure = None

    def snapshot(self) -> None:
        """Copies the table and begins a new log; the copy is written meanwhile."""
        self._wait()
        self._settle()
        state = save(self._table)
        counts = (self._limiter.inserted, self._limiter.sampled)
        old, self._number = self._log, self._number + 1
        self._log = self._open(self._number)
        old.close()
        self._writer = threading.Thread(
            target=self._write_snapshot, args=(self._number, state, counts), daemon=True
        )
        self._writer.start()

    def close(self) -> None:
        """Waits for a snapshot under way and closes the log."""
        self._wait()
        self._settle()
        self._log.close()

    def _settle(self) -> None:
        """Waits until all that was logged is written."""
        self.commit()
        if self._behind is not None:
            self._behind.flush()

    def _wait(self) -> None:
        if self._writer is not None:
            self._writer.join()

    def _open(self, number: int) -> RecordFile:
        log = RecordFile(self._path("log", number))
        if log.size == 0:
            log.append(told({"options": self._options}), [])
        self._grew = log.size
        return log

    def _path(self, kind: str, number: int) -> Path:
        return self._folder / f"{kind}-{number:08d}"

    def _write_snapshot(
        self, number: int, state: dict[str, Array], counts: tuple[int, int]
    ) -> None:
        temporary = self._folder / "snapshot.part"
        temporary.unlink(missing_ok=True)
        file = RecordFile(temporary)
        file.append(told({"options": self._options, "counts": counts}), [])
        for name, array in state.items():
            flat = array.reshape(-1)
            step = max(PIECE // max(array.itemsize, 1), 1)
            form = {"name": name, "shape": array.shape, "dtype": array.dtype.str}
            for start in range(0, max(flat.size, 1), step):
                file.append(told(form), [flat[start : start + step]])
        file.append(told({"end": True}), [])
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
            said = json.loads(record.head)
            if at == 0:
                self._compare(record, path)
                counts = said["counts"]
            elif "name" in said:
                found = [np.frombuffer(part, said["dtype"]) for part in record.parts]
                empty = np.zeros(0, said["dtype"])
                pieces.setdefault(said["name"], []).append(found[0] if found else empty)
                shapes[said["name"]] = said["shape"]
            ended = "end" in said
        self._refuse_if_foreign(reading, path)
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
        self._refuse_if_foreign(reading, path)
        os.truncate(path, reading.good)
        if reading.cut and last:  # its writer was killed before it could acknowledge
            return max(count, 0), None
        return max(count, 0), f"what came after {max(count, 0)} records, as {reading.damage}"

    def _refuse_if_foreign(self, reading: Reading, path: Path) -> None:
        """Leaves alone what does not even begin as it should."""
        if reading.damage is not None and reading.good == 0 and not reading.cut:
            raise UserError(
                f"{path} is no file of this version's replay tables, or is damaged at its very "
                "beginning: give another folder, or move this one away."
            )

    def _compare(self, record: Record, path: Path) -> None:
        found = said_options(record)
        if found != self._options:
            difference = first_difference(found, self._options)
            raise UserError(
                f"{path} belongs to a replay table of other options ({difference}): "
                "give the options it was made with, or another folder."
            )

    def _redo(self, record: Record) -> None:
        kind, parts, table = record.head[:1], record.parts, self._table
        if kind == SAMPLE:
            draws = np.frombuffer(parts[0], record.head[1:].decode())
            table.count_sample(draws)
            self._limiter.sample(draws.size)
        elif kind == UPDATE:
            slot, number = (np.frombuffer(part, np.int64) for part in parts[:2])
            table.update_priorities(Keys(slot, number), np.frombuffer(parts[2], PRIORITY))
        else:
            head = InsertHead.unpacked(record.head[1:])
            before = table.completed
            arrays = parsed(insert_specs(table.form, head), parts)
            if head.given & PLAIN:
                table.insert_plain(plain_of(table.form, head, arrays), head.first, head.last)
            else:
                table.insert_steps(steps_of(table.form, head, arrays), head.first, head.last)
            self._limiter.insert(table.completed - before)

    def _read_epoch(self) -> int:
        path = self._folder / "epoch.json"
        return int(json.loads(path.read_text())["epoch"]) if path.exists() else 0

    def _write_epoch(self) -> None:
        temporary = self._folder / "epoch.part"
        temporary.write_text(json.dumps({"epoch": self._epoch}))
        os.replace(temporary, self._folder / "epoch.json")


def parsed(specs: Sequence[Spec], parts: Sequence[memoryview]) -> list[Array]:
    """Arrays of given shapes and types; those without an element have no part."""
    rest = iter(parts)
    return [
        np.frombuffer(next(rest), dtype).reshape(shape) if prod(shape) else np.zeros(shape, dtype)
        for shape, dtype in specs
    ]


def told(said: dict[str, Any]) -> bytes:
    """The head of a record that is none of the table's doing."""
    return json.dumps(said).encode()


def said_options(record: Record) -> dict[str, Any]:
    """The options at the beginning of a file; none if it does not begin with them."""
    try:
        return dict(json.loads(record.head)["options"])
    except (ValueError, KeyError, TypeError):
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
    """The first option that differs, in words."""
    names = [name for name in wanted if found.get(name) != wanted[name]]
    return f"{names[0]} {found.get(names[0])}, not {wanted[names[0]]}"
