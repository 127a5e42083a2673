"""Restores a durable table up to the last acknowledged record of its folder."""

import json
import os
import struct
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dovetail.errors import UserError
from dovetail.replay.host.table import HostTable
from dovetail.replay.limiter import RateLimiter
from dovetail.replay.sample import ItemKeys
from dovetail.replay.service.messages import (
    OLD,
    PLAIN,
    PRIORITY,
    SAMPLE,
    UPDATE,
    InsertHead,
    insert_specs,
    large_arrays,
    plain_of,
    steps_of,
)
from dovetail.replay.storage.folder import Folder, number_of
from dovetail.replay.storage.records import Reading, StoredRecord
from dovetail.replay.storage.rows_file import RowsFile
from dovetail.replay.storage.save import load, save

Array = np.ndarray[Any, np.dtype[Any]]

_SENSELESS = (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error)
"""What intact records raise that are not those of a table: somebody else's, or of another file."""


class Found(NamedTuple):
    """The state of a folder."""

    number: int
    """Number of the newest log."""
    records: int
    """Number of log records that were replayed."""
    lost: str | None
    """Description of lost acknowledged data; None if nothing was lost."""


def restore(folder: Folder, table: HostTable, limiter: RateLimiter, rows: RowsFile | None) -> Found:
    """Restores an empty table up to the folder's last record."""
    empty = save(table, whole=False)
    restoring = Restoring(folder, table, limiter, rows)
    found = restoring.run()
    if rows is None:
        return found
    damage = rows.damage()
    if damage.record and found.lost is None:
        # Start over, and stop before the first record whose rows are damaged.
        load(table, empty, whole=False)
        limiter.inserted = limiter.sampled = 0
        found = restoring.run(damage.record - 1)
        why = "as rows that the next one stored fail their check sums"
        found = found._replace(lost=f"what came after {found.records} records, {why}")
        damage = rows.damage()
    before = table.size
    kept = restoring.floor
    table.streams.floor = damage.floor if kept is None else np.maximum(damage.floor, kept)
    table.unsettle()
    if table.size == before:
        table.streams.floor = kept
        table.unsettle()
    elif found.lost is None:
        why = "as rows of theirs fail their check sums"
        found = found._replace(lost=f"{before - table.size} items, {why}")
    return found


class Restoring:
    """Replays the files of a folder."""

    def __init__(
        self, folder: Folder, table: HostTable, limiter: RateLimiter, rows: RowsFile | None
    ) -> None:
        self._folder, self._table, self._limiter, self._rows = folder, table, limiter, rows
        self._old: list[tuple[int, Array, memoryview]] = []
        self.floor: Array | None = None
        """The streams' floor at the time of the snapshot."""

    def run(self, most: int | None = None) -> Found:
        """Loads the newest snapshot, and replays at most `most` log records."""
        snapshots, logs = self._folder.files("snapshot"), self._folder.files("log")
        first, records = 0, 0
        lost: str | None = None
        if snapshots:
            first = number_of(snapshots[-1])
            lost = self._load_snapshot(snapshots[-1])
        wanted = first
        for path in logs:
            if lost is None and number_of(path) >= first:
                lost = self._missing(wanted, number_of(path), records)
                wanted += 1
            if lost is None and number_of(path) >= first:
                records, lost = self._follow(path, path == logs[-1], records, most)
        if lost is None and snapshots and wanted == first:
            lost = f"what came after {snapshots[-1].name}, as log-{first:08d} is missing"
        self._put_back()
        return Found(max([first, *map(number_of, logs)]), records, lost)

    def _missing(self, wanted: int, found: int, records: int) -> str | None:
        """Describes the loss if the next log is not the wanted one."""
        if found == wanted:
            return None
        if wanted == 0 and records == 0:
            return f"the whole table, as snapshot-{found:08d} is missing"
        return f"what came after {records} records, as log-{wanted:08d} is missing"

    def _load_snapshot(self, path: Path) -> str | None:
        """Loads a snapshot; returns a description of the loss if it is damaged."""
        try:
            return self._loaded_snapshot(path)
        except _SENSELESS as error:
            return f"the whole table, as {path.name} makes no sense ({error})"

    def _loaded_snapshot(self, path: Path) -> str | None:
        reading = Reading(path)
        pieces: dict[str, list[Array]] = {}
        shapes: dict[str, Any] = {}
        counts, ended = [0, 0], False
        for at, record in enumerate(reading):
            said = json.loads(record.head)
            if at == 0:
                self._folder.compare(record, path)
                counts = said["counts"]
                self.floor = None if said["floor"] is None else np.array(said["floor"], np.int64)
            elif "name" in said:
                found = [np.frombuffer(part, said["dtype"]) for part in record.parts]
                empty = np.zeros(0, said["dtype"])
                pieces.setdefault(said["name"], []).append(found[0] if found else empty)
                shapes[said["name"]] = said["shape"]
            ended = "end" in said
        _refuse_if_foreign(reading, path)
        if reading.damage or not ended:
            return f"the whole table, as {reading.damage or f'{path.name} has no end'}"
        self._table.streams.floor = self.floor
        load(
            self._table,
            {name: np.concatenate(parts).reshape(shapes[name]) for name, parts in pieces.items()},
            whole=False,
        )
        self._limiter.inserted, self._limiter.sampled = counts
        return None

    def _follow(
        self, path: Path, last: bool, records: int, most: int | None
    ) -> tuple[int, str | None]:
        """Replays a log: (number of records so far, description of the loss if it is damaged)."""
        reading = Reading(path)
        for at, record in enumerate(reading):
            if at == 0:
                self._folder.compare(record, path)
            elif records == most:
                return records, None
            else:
                try:
                    self._redo(record, records + 1)
                except _SENSELESS as error:
                    os.truncate(path, reading.good)
                    place = f"the record at byte {reading.good} of {path.name}"
                    return records, f"what came after {records} records, as {place}: {error}"
                records += 1
        if reading.damage is None:
            return records, None
        _refuse_if_foreign(reading, path)
        # New records must follow the last intact one.
        os.truncate(path, reading.good)
        if reading.cut and last:  # the writer was killed before it could acknowledge the record
            return records, None
        return records, f"what came after {records} records, as {reading.damage}"

    def _redo(self, record: StoredRecord, number: int) -> None:
        kind, parts, table = record.head[:1], record.parts, self._table
        if kind == SAMPLE:
            draws = np.frombuffer(parts[0], record.head[1:].decode())
            table.count_sample(draws)
            self._limiter.sample(draws.size)
        elif kind == UPDATE:
            slot, keys = (np.frombuffer(part, np.int64) for part in parts[:2])
            table.update_priorities(ItemKeys(slot, keys), np.frombuffer(parts[2], PRIORITY))
        elif kind == OLD:
            self._old.append((record.head[1], np.frombuffer(parts[0], np.int64), parts[1]))
        else:
            self._old.clear()
            self._redo_insert(record, number)

    def _redo_insert(self, record: StoredRecord, number: int) -> None:
        table, rows = self._table, self._rows
        head = InsertHead.unpacked(record.head[1:])
        specs = insert_specs(table.form, head)
        large = [rows is not None and x for x in large_arrays(table.form, head)]
        rest = iter(record.parts)
        arrays = [
            np.broadcast_to(np.zeros((), dtype), shape)
            if left_out
            else np.frombuffer(next(rest), dtype).reshape(shape)
            if prod(shape)
            else np.zeros(shape, dtype)
            for left_out, (shape, dtype) in zip(large, specs, strict=True)
        ]
        before = table.completed
        if rows is not None:
            rows.sums.tell(np.frombuffer(next(rest, b""), np.uint64), number)
        if head.given & PLAIN:
            table.insert_plain(plain_of(table.form, head, arrays), head.first, head.last)
        else:
            table.insert_steps(steps_of(table.form, head, arrays), head.first, head.last)
        if rows is not None:
            rows.sums.tell(None)
        self._limiter.insert(table.completed - before)

    def _put_back(self) -> None:
        """Undoes an insert that was started and never logged."""
        for at, places, data in self._old:
            assert self._rows is not None
            store = self._rows.stores[at]
            shape = (places.size, *store.shape[1:])
            store.array[places] = np.frombuffer(data, store.dtype).reshape(shape)
        self._old.clear()


def _refuse_if_foreign(reading: Reading, path: Path) -> None:
    """Raises, leaving the file alone, if not even its start is valid."""
    if reading.damage is not None and reading.good == 0 and not reading.cut:
        raise UserError(
            f"{path} is no file of this version's replay tables, or is damaged at its very "
            "beginning: give another folder, or move this one away."
        )


def small_of(arrays: Sequence[Array], large: Sequence[bool]) -> list[Array]:
    """The arrays of an insert that are logged where large leaves are mapped."""
    return [array for array, left_out in zip(arrays, large, strict=True) if not left_out]
