"""Record files with check sums: lengths, a check sum, a head, arrays; nothing pickled.

A record is a prefix and a body. The body has the lengths of its parts, a head, and the parts. The
prefix has the body's check sum, the length of the head, the number of parts, the length of the
body, and a check sum of these three, so that a truncated file can be told from a damaged one. A
check sum is a CRC-32; large parts enter it through sums over blocks of words, which takes a tenth
of the time.
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
"""Parts of at least this many bytes are checked by sums over blocks."""
MOST = 64
"""Maximum number of parts per write call."""
BLOCK = 512
"""8-byte words per block."""


class StoredRecord(NamedTuple):
    """A record that was read."""

    head: bytes
    parts: list[memoryview]


class RecordStart(NamedTuple):
    """The common start of records with one head and parts of the same lengths."""

    data: bytes
    """Everything between the body's check sum and the parts."""
    check: int
    """Check sum of the portion that belongs to the body."""
    size: int
    """Total bytes of the record."""


def start_of(head: bytes, arrays: Sequence[Array]) -> RecordStart:
    """The start of a record."""
    sizes = b"".join([x.nbytes.to_bytes(4, "little") for x in arrays if x.size])
    begun = sizes + head
    length = len(begun) + sum([x.nbytes for x in arrays])
    lengths = _LENGTHS.pack(len(head), len(sizes) // 4, length)
    data = lengths + summed(crc32(lengths)) + begun
    return RecordStart(data, crc32(begun), PREFIX + length)


class RecordFile:
    """A file to which records are appended; written records survive the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.size = os.fstat(self._file).st_size

    def append(self, head: bytes, arrays: Sequence[Array]) -> None:
        """Appends one record."""
        self.write(start_of(head, arrays), [in_one_piece(array) for array in arrays])

    def write(self, start: RecordStart, arrays: Sequence[Any], check: int | None = None) -> None:
        """Writes one record directly from its arrays, each of which is `in_one_piece`; `check` is
        its check sum, if known."""
        if check is None:
            check = check_of(start.check, arrays)
        parts = [array for array in arrays if array.nbytes]
        self._commit([summed(check) + start.data, *parts], start.size)

    def _commit(self, written: list[Any], size: int) -> None:
        """Writes a record, or nothing of it: a partial one is truncated."""
        try:
            self._write(written, size)
        except OSError as error:
            os.ftruncate(self._file, self.size)  # records after a partial one could not be read
            raise UserError(
                f"{self._path} could not be written ({error.strerror}): make room and go on."
            ) from error
        self.size += size

    def _write(self, parts: list[Any], size: int) -> None:
        """Writes all parts, in as few calls as possible."""
        # Usually one call writes the whole record without joining its parts.
        written = os.writev(self._file, parts[:MOST])
        if written == size:
            return
        # A signal or a full disk may interrupt a call.
        rest = [memoryview(part).cast("B") for part in parts]
        while written < size:
            size -= written
            while written >= len(rest[0]):
                written -= len(rest.pop(0))
            rest[0] = rest[0][written:]
            written = os.writev(self._file, rest[:MOST])

    def sync(self) -> None:
        """Waits until the data are on disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def discard(self) -> None:
        """Closes the file and removes it."""
        os.close(self._file)
        self._path.unlink()


class Reading:
    """Reads a file's records up to its end or the first incomplete one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.good = 0
        """Bytes of the intact records."""
        self.damage: str | None = None
        """What is wrong with the next record; None at the end of the file."""
        self.cut = False
        """Whether the file ends within it, as when its writer was killed."""

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
    """The check sum of a body, continued from that of its start; `parts` are contiguous."""
    for part in parts:
        begun = crc32(part, begun) if part.nbytes < LARGE else _by_blocks(part, begun)
    return begun


def summed(check: int) -> bytes:
    """A check sum as bytes."""
    return check.to_bytes(_SUM, "little")


def in_one_piece(array: Array) -> Array:
    """An array that can be written directly: contiguous, and of a dtype with a buffer."""
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
    # The bytes after the last whole block are checked one by one.
    return crc32(raw[blocks.nbytes :], crc32(sums, check))
