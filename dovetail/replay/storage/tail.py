"""A log whose newest records lie in a small mapped file, from which they are written in bulk.

Data in mapped memory survive the process, as data in a file do, and storing a small record there
takes a quarter of the time of a write. The tail records its log, the offset at which it continues
that log, and its number of used bytes. They are updated in an order such that a process killed in
between loses nothing.
"""

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import UserError
from dovetail.replay.storage.records import RecordFile, RecordStart, check_of, summed

TAIL_NAME = "tail"
TAIL = 1 << 18
"""Capacity of a tail in bytes of records."""
HEAD = 64
"""Bytes before the records."""
NUMBER, BASE, USED = range(3)
"""Header fields: number of the log, size of its file without the tail, and bytes in use."""


class Tail:
    """The mapped file, created if missing."""

    def __init__(self, path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.posix_fallocate(file, 0, HEAD + TAIL)
            self._memory = mmap.mmap(file, HEAD + TAIL)
        except OSError as error:
            raise UserError(
                f"{path} could not be made ({error.strerror}): make room, or give another folder."
            ) from error
        finally:
            os.close(file)
        self.numbers = np.frombuffer(self._memory, np.int64, HEAD // 8)
        self.used = int(self.numbers[USED])

    def begin(self, number: int, base: int) -> None:
        """Empties the tail, which now continues log `number` at byte `base`."""
        self.used = 0
        self.numbers[USED] = 0  # first, so that old records never count under the new header
        self.numbers[NUMBER], self.numbers[BASE] = number, base

    def add(self, begin: bytes, arrays: Sequence[Any]) -> None:
        """Appends a record: its start, and contiguous arrays. It must fit."""
        memory, at = self._memory, HEAD + self.used
        end = at + len(begin)
        memory[at:end] = begin
        for array in arrays:
            at, end = end, end + array.nbytes
            memory[at:end] = array
        self.used = self.numbers[USED] = end - HEAD

    def data(self) -> bytes:
        """All used bytes."""
        return self._memory[HEAD : HEAD + self.used]

    def put_back(self, log: Path) -> str | None:
        """Writes the used bytes to their log, which may already have some of them.

        Returns a description of the damage if the log lacks bytes before them.
        """
        base = int(self.numbers[BASE])
        if not 0 <= self.used <= TAIL or base < 0:
            self.begin(0, 0)
            return f"{TAIL_NAME} is damaged"
        size = log.stat().st_size if log.exists() else 0
        if size < base:
            return (
                f"{log.name} has {size} of its {base} bytes" if size else f"{log.name} is missing"
            )
        if not self.used:
            return None
        file = os.open(log, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            # A flush may have been interrupted: cut off what it wrote.
            os.ftruncate(file, base)
            os.pwrite(file, self.data(), base)
        finally:
            os.close(file)
        self.begin(int(self.numbers[NUMBER]), base + self.used)
        return None


class TailedFile(RecordFile):
    """A file of records with a tail."""

    def __init__(self, path: Path, number: int, tail: Tail) -> None:
        super().__init__(path)
        self._number, self._tail = number, tail
        self.take_tail()

    def take_tail(self) -> None:
        """Takes over the tail, whose contents must already be written."""
        self._tail.begin(self._number, self.size)

    def write(self, start: RecordStart, arrays: Sequence[Any], check: int | None = None) -> None:
        """Writes one record directly from its arrays, to the tail if it fits."""
        if start.size > TAIL - self._tail.used:
            super().write(start, arrays, check)
            return
        if check is None:
            check = check_of(start.check, arrays)
        self._tail.add(summed(check) + start.data, arrays)

    def _commit(self, written: list[Any], size: int) -> None:
        tail = self._tail
        if size > TAIL - tail.used:
            self.flush()
            if size > TAIL:
                super()._commit(written, size)
                self.take_tail()
                return
        tail.add(b"".join(written), ())

    def flush(self) -> None:
        """Writes the tail to the file."""
        if self._tail.used:
            super()._commit([self._tail.data()], self._tail.used)
            self.take_tail()

    def close(self) -> None:
        """Closes the file; records that could not be written stay in the tail."""
        with contextlib.suppress(UserError):
            self.flush()
        super().close()
