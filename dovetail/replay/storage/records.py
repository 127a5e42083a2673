"""Files of records that tell what is whole: lengths, a check sum, a head, arrays; nothing pickled.

A record is a prefix and a body. The body has the lengths of its parts, a head, and the parts. The
prefix has the body's check sum, the length of the head, the number of parts, the length of the
body, and a check sum of these three, so that a file that stops within a record is told from one
that is damaged. A check sum is a CRC-32; large parts enter it by the sums of their blocks of words,
which takes a tenth of the time.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from dovetail.errors import UserError

Array = np.ndarray[Any, np.dtype[Any]]

_SUM = 4
_LENGTHS = struct.Struct("<IIQ")
PREFIX = _SUM + _LENGTHS.size + _SUM
LARGE = 1 << 14
"""Bytes from which a part is checked by the sums of its blocks."""
MOST = 64
"""Parts that are written at a time."""
BLOCK = 512
"""Words of 8 bytes in a block."""


class StoredRecord(NamedTuple):
    """What was read."""

    head: bytes
    parts: list[memoryview]


class RecordStart(NamedTuple):
    """What records of one head and of parts of the same lengths begin with."""

    data: bytes
    """All that comes between the body's check sum and the parts."""
    check: int
    """The check sum of what of it is the body's."""
    size: int
    """Bytes of the record."""


def start_of(head: bytes, arrays: Sequence[Array]) -> RecordStart:
    """That beginning."""
    sizes = b"".join([x.nbytes.to_bytes(4, "little") for x in arrays if x.size])
    begun = sizes + head
    length = len(begun) + sum([x.nbytes for x in arrays])
    lengths = _LENGTHS.pack(len(head), len(sizes) // 4, length)
    data = lengths + summed(crc32(lengths)) + begun
    return RecordStart(data, crc32(begun), PREFIX + length)


class RecordFile:
    """A file that records are appended to; one that was written outlives the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.size = os.fstat(self._file).st_size

    def append(self, head: bytes, arrays: Sequence[Array]) -> None:
        """Writes one record."""
        self.write(start_of(head, arrays), [in_one_piece(array) for array in arrays])

    def write(self, start: RecordStart, arrays: Sequence[Any], check: int | None = None) -> None:
        """Writes one record straight from its arrays, each of which is `in_one_piece`; `check`:
        its check sum, if it is known."""
        if check is None:
            check = check_of(start.check, arrays)
        parts = [array for array in arrays if array.nbytes]
        self._commit([summed(check) + start.data, *parts], start.size)

    def _commit(self, written: list[Any], size: int) -> None:
        try:
            self._write(written, size)
        except OSError as error:
            os.ftruncate(self._file, self.size)  # what follows half a record could not be read
            raise UserError(
                f"{self._path} could not be written ({error.strerror}): make room and go on."
            ) from error
        self.size += size

    def _write(self, parts: list[Any], size: int) -> None:
        written = os.writev(self._file, parts[:MOST])
        if written == size:
            return
        rest = [memoryview(part).cast("B") for part in parts]
        while written < size:
            size -= written
            while written >= len(rest[0]):
                written -= len(rest.pop(0))
            rest[0] = rest[0][written:]
            written = os.writev(self._file, rest[:MOST])

    def sync(self) -> None:
        """Waits until the disk has it all."""
        os.fsync(self._file)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def discard(self) -> None:
        """Closes the file and removes it."""
        os.close(self._file)
        self._path.unlink()


class Reading:
    """Reads a file's records until its end, or until one is not whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.good = 0
        """Bytes of the records that were whole."""
        self.damage: str | None = None
        """What was wrong with the next one; None at the end of the file."""
        self.cut = False
        """Whether the file just stops within it, as when its writer was killed."""

    def __iter__(self) -> Iterator[StoredRecord]:
        with self._path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            while self.good < total:
                prefix = file.read(PREFIX)
                if len(prefix) < PREFIX:
                    return self._stop("is cut short", cut=True)
                lengths, check = prefix[_SUM:-_SUM], int.from_bytes(prefix[:_SUM], "little")
                head_length, count, length = _LENGTHS.unpack(lengths)
                if crc32(lengths) != int.from_bytes(prefix[-_SUM:], "little"):
                    return self._stop("fails its check sum", cut=False)
                if self.good + PREFIX + length > total:
                    return self._stop("is cut short", cut=True)
                body = memoryview(file.read(length))
                record = _parsed(body, head_length, count)
                begun = crc32(body[: 4 * count + head_length])
                if check_of(begun, record.parts) != check:
                    return self._stop("fails its check sum", cut=False)
                yield record
                self.good += PREFIX + length
        return None

    def _stop(self, damage: str, cut: bool) -> None:
        self.damage = f"the record at byte {self.good} of {self._path.name} {damage}"
        self.cut = cut


def check_of(begun: int, parts: Sequence[Any]) -> int:
    """The check sum of a body, from that of what it begins with; `parts` are in one piece."""
    for part in parts:
        begun = crc32(part, begun) if part.nbytes < LARGE else _by_blocks(part, begun)
    return begun


def summed(check: int) -> bytes:
    """A check sum as it is written."""
    return check.to_bytes(_SUM, "little")


def in_one_piece(array: Array) -> Array:
    """An array that can be written as it lies: in one piece, and of a type that has a buffer."""
    if array.flags.c_contiguous and array.dtype.kind in "fiub":
        return array
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _parsed(body: memoryview, head_length: int, count: int) -> StoredRecord:
    start = 4 * count + head_length
    parts: list[memoryview] = []
    for size in np.frombuffer(body, np.uint32, count).tolist():
        parts.append(body[start : start + size])
        start += size
    return StoredRecord(bytes(body[4 * count : 4 * count + head_length]), parts)


def _by_blocks(part: Any, check: int) -> int:
    raw = memoryview(part).cast("B")
    words = np.frombuffer(raw, np.uint64, len(raw) // 8)
    blocks = words[: words.size // BLOCK * BLOCK].reshape(-1, BLOCK)
    sums = np.add.reduce(blocks, axis=1)
    return crc32(raw[blocks.nbytes :], crc32(sums, check))
