"""Files of records that tell what is whole: length, check sum, header, arrays; nothing pickled.

A record is a prefix and a body. The body is a header in JSON (what it is, the names, types and
shapes of its arrays) and the arrays' own bytes; the prefix is four numbers of 4 bytes: the lengths
of the body and of the header in it, the body's CRC-32, and that of the three.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dovetail.errors import UserError

Array = np.ndarray[Any, np.dtype[Any]]

_PREFIX = struct.Struct("<IIII")
KNOWN = 256
"""Headers that are kept ready."""


class Record(NamedTuple):
    """What was read: a header and arrays."""

    header: dict[str, Any]
    arrays: dict[str, Array]


class RecordFile:
    """A file that records are appended to; a record that was appended outlives the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._headers: dict[Any, bytes] = {}
        self.size = os.fstat(self._file).st_size

    def append(self, header: tuple[tuple[str, Any], ...], arrays: Mapping[str, Array]) -> None:
        """Writes one record, in one piece as far as the system lets it."""
        layout = (header, tuple((name, x.dtype.str, x.shape) for name, x in arrays.items()))
        start = self._headers.get(layout)
        if start is None:
            whole = dict(header) | {"arrays": layout[1]}
            if len(self._headers) > KNOWN:
                self._headers.clear()
            start = self._headers[layout] = json.dumps(whole).encode()
        parts = [
            np.ascontiguousarray(x).reshape(-1).view(np.uint8).data
            for x in arrays.values()
            if x.size
        ]
        check = zlib.crc32(start)
        for part in parts:
            check = zlib.crc32(part, check)
        length = len(start) + sum(len(part) for part in parts)
        prefix = memoryview(_prefix(length, len(start), check))
        try:
            self._write([prefix, memoryview(start), *parts])
        except OSError as error:
            os.ftruncate(self._file, self.size)  # what follows half a record could not be read
            raise UserError(
                f"{self._path} could not be written ({error.strerror}): make room and go on."
            ) from error
        self.size += len(prefix) + length

    def _write(self, parts: list[memoryview]) -> None:
        while parts:
            written = os.writev(self._file, parts[:64])
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][written:]

    def sync(self) -> None:
        """Waits until the disk has it all."""
        os.fsync(self._file)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


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

    def __iter__(self) -> Iterator[Record]:
        with self._path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            while self.good < total:
                prefix = file.read(_PREFIX.size)
                if len(prefix) < _PREFIX.size:
                    self._stop("is cut short", cut=True)
                    return
                length, header, check, _ = _PREFIX.unpack(prefix)
                if _prefix(length, header, check) != prefix:
                    self._stop("fails its check sum", cut=False)
                    return
                body = file.read(length)
                if len(body) < length:
                    self._stop("is cut short", cut=True)
                    return
                if zlib.crc32(body) != check:
                    self._stop("fails its check sum", cut=False)
                    return
                yield _parsed(body, header)
                self.good += _PREFIX.size + length

    def _stop(self, damage: str, cut: bool) -> None:
        self.damage = f"the record at byte {self.good} of {self._path.name} {damage}"
        self.cut = cut


def _prefix(length: int, header: int, check: int) -> bytes:
    own = zlib.crc32(_PREFIX.pack(length, header, check, 0))
    return _PREFIX.pack(length, header, check, own)


def _parsed(body: bytes, header_length: int) -> Record:
    header = json.loads(body[:header_length])
    arrays: dict[str, Array] = {}
    at = header_length
    for name, dtype, shape in header.pop("arrays"):
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(body, kind, count, at).reshape(shape)
        at += count * kind.itemsize
    return Record(header, arrays)
