"""The folder of a durable replay service: snapshots, and a log of everything since.

Every insert, sample and priority update is appended to the log before it is acknowledged. Replaying
them in order restores the same table, priorities and counts, because a table has no randomness of
its own. Large leaves and frames lie in a mapped file wherever possible, and the log has only their
check sums. Appended and mapped data survive the process, even if it is killed (but not a power
failure: neither is forced to disk). When the log has grown, the table is copied, a new log starts,
and the copy is written in the background.
"""

import os
import sys
import threading
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import UserError
from dovetail.replay.host.incoming import IncomingSteps, Plain
from dovetail.replay.host.mapped import Mapped
from dovetail.replay.host.table import HostTable
from dovetail.replay.limiter import RateLimiter
from dovetail.replay.sample import ItemKeys
from dovetail.replay.service.messages import (
    OLD,
    PLAIN,
    PRIORITIES,
    PRIORITY,
    SAMPLE,
    UPDATE,
    InsertHead,
    arrays_of,
    head_of,
    insert_start,
    large_arrays,
)
from dovetail.replay.storage.folder import Folder, told
from dovetail.replay.storage.records import RecordFile, RecordStart, in_one_piece, start_of
from dovetail.replay.storage.restore import restore, small_of
from dovetail.replay.storage.rows_file import RowsFile, is_mapped
from dovetail.replay.storage.save import save
from dovetail.replay.storage.tail import NUMBER, Tail, TailedFile
from dovetail.replay.storage.write_behind import Behind, Done

Array = np.ndarray[Any, np.dtype[Any]]

KNOWN = 256
"""Number of record starts that are cached."""
FEW = 1 << 16
"""Records up to this many bytes are faster to write directly than to hand to another thread."""
PIECE = 1 << 28
"""Bytes of an array per record of a snapshot."""


@dataclass(frozen=True)
class Restored:
    """The state in which a journal was found."""

    records: int
    """Number of log records that were replayed."""
    lost: str | None
    """Description of lost acknowledged data; None if nothing was lost."""
    epoch: int
    """Incremented when data were lost: clients that know another number must not rely on theirs."""


class Journal:
    """The folder of one durable table; a log larger than `grown` bytes triggers a snapshot."""

    def __init__(
        self,
        folder: Path,
        table: HostTable,
        limiter: RateLimiter,
        grown: int,
        behind: bool = False,
    ) -> None:
        """`behind`: another thread may write large records; see `when_kept`."""
        self._table, self._limiter, self._grown = table, limiter, grown
        # Mapped rows are overwritten at once, so their log records must be written at once too.
        mapped = is_mapped(table.form)
        self._most = FEW if behind and not mapped else sys.maxsize
        self._behind: Behind | None = None
        self._packed = mapped or not (table.form.packing.alone or table.form.stacks)
        self._folder = Folder(folder, table, limiter)
        self._starts: dict[tuple[int, int, int, bool], RecordStart] = {}
        self._stale = False  # whether the log lacks changes that the table has
        self._writer: threading.Thread | None = None
        self._unwritten: UserError | None = None
        self._begun = np.zeros(table.layout.envs, np.int64)
        self._tail = Tail(self._folder.tail)
        cut = self._tail.put_back(self._folder.path("log", int(self._tail.numbers[NUMBER])))
        self._rows_number = self._folder.rows_number()
        self._rows: RowsFile | None = None
        if mapped:
            self._folder.remove_other_rows(self._rows_number)
            self._rows = self._map(self._rows_number)
        self.restored = self._restore(cut)

    def _map(self, number: int) -> RowsFile:
        return RowsFile(self._folder.path("rows", number), self._table.streams, self._guard)

    def _restore(self, cut: str | None) -> Restored:
        """Restores the table up to the folder's last acknowledged record; `cut` describes what the
        end of its log lacks."""
        folder = self._folder
        fresh = not folder.files("snapshot") and not folder.files("log")
        self._number, records, lost = restore(folder, self._table, self._limiter, self._rows)
        if lost is None and cut is not None:
            lost = f"what came after {records} records, as {cut}"
        epoch = folder.read_epoch()
        if lost is not None or fresh:
            epoch += 1
            folder.write_epoch(epoch)
        self._begun[:] = self._table.streams.counters.begun
        self._log = self._open(self._number)
        if lost is not None:
            self.renew()  # records after the damage can never be reached
        return Restored(records, lost, epoch)

    def _guard(self, store: Mapped, places: Array) -> None:
        """Logs mapped rows before they are overwritten, if items would need them after a crash."""
        rows = self._rows
        if self._stale or rows is None or not rows.needed(store, places, self._begun):
            return
        try:
            self._settle()
            head, old = OLD + bytes([rows.stores.index(store)]), store.array[places]
            self._log.append(head, [places.astype(np.int64), old])
            self._grew += old.nbytes
        except UserError:
            self._stale = True  # the current insert raises later

    def insert(self, steps: IncomingSteps | Plain, first: int, last: int) -> None:
        """Logs an insert that the table has just made; if possible, in storage format."""
        written = self._table.streams.written
        if written is None:
            assert isinstance(steps, IncomingSteps)
            self._insert_steps(steps, first, last)
            return
        plain = written.plain
        arrays = [plain.block]
        if not self._packed:
            arrays += map(in_one_piece, (*plain.alone, *plain.frames))
        if plain.priorities is not None:
            arrays.append(plain.priorities)
        if self._rows is not None:
            arrays.append(self._sums(self._rows))
        form = (plain.length, first, last, plain.priorities is not None)
        start = self._starts.get(form) or self._start(form, arrays)
        if steps is not plain and (self._behind is not None or start.size >= self._most):
            arrays[0] = plain.block.copy()  # the table reuses its block
        self._put(start, arrays, plain.check)

    def _insert_steps(self, steps: IncomingSteps, first: int, last: int) -> None:
        """Logs an insert in the format it arrived in."""
        head, arrays = head_of(steps, first, last), arrays_of(steps)
        if self._rows is not None:
            arrays = small_of(arrays, large_arrays(self._table.form, head))
            arrays.append(self._sums(self._rows))
        self._put(insert_start(head, arrays), [in_one_piece(array) for array in arrays])

    def _sums(self, rows: RowsFile) -> Array:
        """The check sums of the mapped rows that an insert has stored."""
        self._begun[:] = self._table.streams.counters.begun
        return rows.sums.taken()

    def _start(self, form: tuple[int, int, int, bool], arrays: list[Array]) -> RecordStart:
        """The start of log records for plain inserts of a form, cached."""
        given = PLAIN | PRIORITIES if form[3] else PLAIN
        if len(self._starts) >= KNOWN:
            self._starts.clear()
        start = self._starts[form] = insert_start(InsertHead(given, *form[:3], ()), arrays)
        return start

    def sample(self, draws: Array) -> None:
        """Logs a sample."""
        self._append(SAMPLE + draws.dtype.str.encode(), [draws])

    def update(self, keys: ItemKeys, priorities: Array) -> None:
        """Logs a priority update."""
        whole = np.int64
        numbers = [np.asarray(keys.slot, whole), np.asarray(keys.number, whole)]
        self._append(UPDATE, [*numbers, np.asarray(priorities, PRIORITY)])

    def _append(self, head: bytes, arrays: list[Array]) -> None:
        self._put(start_of(head, arrays), [in_one_piece(array) for array in arrays])

    def _put(self, start: RecordStart, arrays: list[Array], check: int | None = None) -> None:
        """Logs a record; a large one, and those after it, are written by the background thread."""
        if self._stale or (self._behind is not None and self._behind.failure is not None):
            self.renew()  # the snapshot includes this change
            return
        if start.size < self._most and (self._behind is None or self._behind.idle):
            try:
                self._log.write(start, arrays, check)
            except UserError:
                self._stale = True
                raise
        else:
            if self._behind is None:
                self._behind = Behind()
            self._behind.write(partial(self._log.write, start, arrays, check))
        self._grew += start.size
        if self._grew > self._grown and (self._writer is None or not self._writer.is_alive()):
            self._warn()
            self.snapshot()

    def when_kept(self, done: Done) -> None:
        """Calls `done` once everything logged so far is written, or could not be."""
        if self._behind is None:
            done(None)
        elif self._behind.idle:
            done(self._behind.failure)
        else:
            self._behind.then(done)

    def renew(self) -> None:
        """Persists the current table regardless of the log: a snapshot, and a new log."""
        self._stale = True
        self.snapshot()
        self.wait()
        if self._unwritten is not None:
            raise self._unwritten
        self._stale = False
        if self._behind is not None:
            self._behind.failure = None

    def _warn(self) -> None:
        """Warns that the last snapshot was not written; logs since the previous one are kept."""
        if self._unwritten is not None:
            warnings.warn(f"{self._unwritten} Until then the log grows.", stacklevel=2)

    def move(self) -> None:
        """Makes the table store its rows in a new, empty file; until the next snapshot is written,
        the old state can be restored."""
        if self._rows is not None:
            self.wait()
            self._settle()
            self._rows.close()
            self._rows_number = self._number + 1
            self._rows = self._map(self._rows_number)

    def snapshot(self) -> None:
        """Copies the table and starts a new log; a thread writes the copy."""
        self.wait()
        self._settle()
        state = save(self._table, whole=False)
        floor = self._table.streams.floor
        said = {
            "options": self._folder.options,
            "rows": self._rows_number,
            "counts": (self._limiter.inserted, self._limiter.sampled),
            "floor": None if floor is None else floor.tolist(),
        }
        self._log.flush()
        # Opened before the old log is closed: if that fails, the old one stays in use.
        begun = self._begin(self._number + 1)
        self._log.close()
        self._log, self._number, self._unwritten = begun, self._number + 1, None
        self._writer = threading.Thread(
            target=self._write_snapshot, args=(self._number, said, state), daemon=True
        )
        self._writer.start()

    def close(self) -> None:
        """Waits for a snapshot in progress and closes the log."""
        self.wait()
        self._warn()
        self._settle()
        self._log.close()
        if self._rows is not None:
            self._rows.close()
        self._folder.lock.close()

    def _settle(self) -> None:
        """Waits until everything logged is written."""
        if self._behind is not None:
            self._behind.flush()

    def wait(self) -> None:
        """Waits for a snapshot in progress."""
        if self._writer is not None:
            self._writer.join()

    def _begin(self, number: int) -> TailedFile:
        """Starts another log; if that fails, the current one continues."""
        try:
            return self._open(number)
        except UserError:
            self._log.take_tail()
            raise

    def _open(self, number: int) -> TailedFile:
        log = TailedFile(self._folder.path("log", number), number, self._tail)
        if log.size == 0:
            try:
                log.append(told({"options": self._folder.options, "rows": self._rows_number}), [])
                log.flush()
            except UserError:
                log.discard()
                raise
        self._grew = log.size
        return log

    def _write_snapshot(self, number: int, said: dict[str, Any], state: dict[str, Array]) -> None:
        try:
            self._write_whole(number, said, state)
        except (OSError, UserError) as error:
            self._unwritten = UserError(
                f"A snapshot of the replay table could not be written ({error}): make room in "
                f"{self._folder.where}."
            )

    def _write_whole(self, number: int, said: dict[str, Any], state: dict[str, Array]) -> None:
        if self._rows is not None:
            self._rows.sync()
        temporary = self._folder.part("snapshot")
        file = RecordFile(temporary)
        file.append(told(said), [])
        for name, array in state.items():
            flat = array.reshape(-1)
            step = max(PIECE // max(array.itemsize, 1), 1)
            form = {"name": name, "shape": array.shape, "dtype": array.dtype.str}
            for start in range(0, max(flat.size, 1), step):
                file.append(told(form), [flat[start : start + step]])
        file.append(told({"end": True}), [])
        file.sync()
        file.close()
        os.replace(temporary, self._folder.path("snapshot", number))
        self._folder.remove_before(number, said["rows"])
