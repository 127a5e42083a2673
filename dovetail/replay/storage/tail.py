"""A log whose newest records lie in a small mapped file, to be written many at a time.

What is in mapped memory outlives the process, as what is in a file does, and to put a small record
there takes a quarter of the time of a write. The tail says to which log it belongs, from which byte
on, and how many bytes are in use: they are set in such an order that whoever is killed between two
of them loses nothing.
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

TAIL = 1 << 18
"""Bytes of records that a tail has room for."""
HEAD = 64
"""Bytes before them."""
NUMBER, BASE, USED = range(3)
"""Its numbers: the log's, where its file ends without the tail, and the bytes in use."""


class Tail:
    """The mapped file, made if there is none."""

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
        """From now on it has what comes after so many bytes of a log."""
        self.used = 0
        self.numbers[USED] = 0  # before the others: nothing of it counts
        self.numbers[NUMBER], self.numbers[BASE] = number, base

    def add(self, begin: bytes, arrays: Sequence[Any]) -> None:
        """Keeps a record: what it begins with, and arrays in one piece; there must be room."""
        memory, at = self._memory, HEAD + self.used
        end = at + len(begin)
        memory[at:end] = begin
        for array in arrays:
            at, end = end, end + array.nbytes
            memory[at:end] = array
        self.used = self.numbers[USED] = end - HEAD

    def data(self) -> bytes:
        """All that is in use."""
        return self._memory[HEAD : HEAD + self.used]

    def put_back(self, log: Path) -> None:
        """Writes what is in use to the log that it belongs to, where it may be in part already."""
        if not self.used:
            return
        base = int(self.numbers[BASE])
        file = os.open(log, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.ftruncate(file, base)
            os.pwrite(file, self.data(), base)
        finally:
            os.close(file)
        self.begin(int(self.numbers[NUMBER]), base + self.used)


class TailedFile(RecordFile):
    """A file of records with a tail."""

    def __init__(self, path: Path, number: int, tail: Tail) -> None:
        super().__init__(path)
        self._number, self._tail = number, tail
        self.take_tail()

    def take_tail(self) -> None:
        """From now on the tail is this file's; what it has must be written."""
        self._tail.begin(self._number, self.size)

    def write(self, start: RecordStart, arrays: Sequence[Any], check: int | None = None) -> None:
        """Writes one record straight from its arrays, to the tail where it has room."""
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
        """Closes the file; what could not be written stays in the tail."""
        with contextlib.suppress(UserError):
            self.flush()
        super().close()
