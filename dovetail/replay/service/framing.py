"""Messages on a socket, each behind its length.

What has come is read in one go, however many messages that is: to ask the system for each of them
takes longer than most of them take to answer. No length is believed beyond a bound.
"""

import os
import select
import struct
from multiprocessing.connection import Connection

_LENGTH = struct.Struct("<Q")
AT_ONCE = 1 << 16
"""Bytes that are read at a time."""
SHORT, LONG = 1 << 26, 1 << 33
"""The most bytes of a message: without arrays in it, and with them."""


class Letters:
    """One end of a connection."""

    def __init__(self, connection: Connection, most: int = SHORT) -> None:
        """`connection` stays its owner's, who closes it; messages have at `most` so many bytes."""
        self._connection, self._most = connection, most
        self._arrived = select.poll()
        self._arrived.register(connection.fileno(), select.POLLIN)
        self._data, self._at = b"", 0

    @property
    def waiting(self) -> bool:
        """Whether a message has been read that was not received yet."""
        return self._end() <= len(self._data)

    def send(self, message: bytes, arrays: memoryview | None = None) -> None:
        """Sends a message; `arrays` are its end, which is not copied."""
        size = len(message) + (0 if arrays is None else arrays.nbytes)
        self._write(memoryview(_LENGTH.pack(size) + message))
        if arrays is not None:
            self._write(arrays.cast("B"))

    def _write(self, rest: memoryview) -> None:
        while rest.nbytes:
            rest = rest[os.write(self._connection.fileno(), rest) :]

    def receive(self, limit: float | None = None) -> bytes:
        """The next message; raises TimeoutError if none comes within `limit` seconds, and EOFError
        when the other end has hung up, or sends what is no message."""
        while (end := self._end()) > len(self._data):
            if end - self._at > self._most + _LENGTH.size:
                raise EOFError(f"a message of {end - self._at} bytes")
            left = end - len(self._data)
            if left > AT_ONCE:
                return self._receive_long(end, limit)
            self._data, self._at = self._data[self._at :] + self._read(AT_ONCE, limit), 0
        message = self._data[self._at + _LENGTH.size : end]
        self._at = end
        return message

    def _read(self, size: int, limit: float | None) -> bytes:
        # Who sleeps in a read is woken by every message that the other end takes: hence poll.
        if limit is not None and not self._arrived.poll(1000 * limit):
            raise TimeoutError
        came = os.read(self._connection.fileno(), size)
        if not came:
            raise EOFError
        return came

    def _receive_long(self, end: int, limit: float | None) -> bytes:
        """A message of which much is to come; joined once."""
        parts, left = [self._data[self._at + _LENGTH.size :]], end - len(self._data)
        while left:
            parts.append(self._read(min(left, 1 << 20), limit))
            left -= len(parts[-1])
        self._data, self._at = b"", 0
        return b"".join(parts)

    def _end(self) -> int:
        """Where the next message ends, as far as that is known."""
        begin = self._at + _LENGTH.size
        if begin > len(self._data):
            return begin
        return begin + _LENGTH.unpack_from(self._data, self._at)[0]
