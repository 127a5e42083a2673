"""Messages on a socket, each preceded by its length.

All available bytes are read in one call, however many messages they hold: one system call per
message takes longer than most messages take to answer. Lengths beyond a bound are rejected.
"""

import os
import select
import struct
from multiprocessing.connection import Connection

_LENGTH = struct.Struct("<Q")
AT_ONCE = 1 << 16
"""Bytes per read."""
SHORT, LONG = 1 << 26, 1 << 33
"""Maximum bytes of a message: without arrays in it, and with them."""


class MessageStream:
    """One end of a connection, as a stream of messages."""

    def __init__(self, connection: Connection, most: int = SHORT) -> None:
        """The caller still owns `connection` and closes it; messages have at most `most` bytes."""
        self._connection, self._most = connection, most
        self._descriptor = connection.fileno()
        self._arrived = select.poll()
        self._arrived.register(self._descriptor, select.POLLIN)
        self._data, self._at = b"", 0

    @property
    def waiting(self) -> bool:
        """Whether a whole message has been read but not yet received."""
        return self._end() <= len(self._data)

    def send(self, message: bytes, arrays: memoryview | None = None) -> None:
        """Sends a message; `arrays` follow it without a copy."""
        if arrays is None:
            whole = _LENGTH.pack(len(message)) + message
            # A short message goes out in one piece, as a rule: no views are made for it.
            sent = os.write(self._descriptor, whole)
            if sent < len(whole):
                self._write(memoryview(whole)[sent:])
            return
        self._write(memoryview(_LENGTH.pack(len(message) + arrays.nbytes) + message))
        self._write(arrays.cast("B"))

    def _write(self, rest: memoryview) -> None:
        while rest.nbytes:
            rest = rest[os.write(self._descriptor, rest) :]

    def receive(self, limit: float | None = None) -> bytes:
        """The next message; raises TimeoutError if none comes within `limit` seconds, and EOFError
        when the other end has disconnected or sends an invalid length."""
        while (end := self._end()) > len(self._data):
            # Checked before anything is allocated: the length comes from the other end.
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
        # Poll first: a thread blocked in read wakes for every message that the other end takes.
        if limit is not None and not self._arrived.poll(1000 * limit):
            raise TimeoutError
        came = os.read(self._descriptor, size)
        if not came:
            raise EOFError
        return came

    def _receive_long(self, end: int, limit: float | None) -> bytes:
        """A message of which much is still to come; joined once."""
        parts, left = [self._data[self._at + _LENGTH.size :]], end - len(self._data)
        while left:
            parts.append(self._read(min(left, 1 << 20), limit))
            left -= len(parts[-1])
        self._data, self._at = b"", 0
        return b"".join(parts)

    def _end(self) -> int:
        """Where the next message ends, as far as known."""
        begin = self._at + _LENGTH.size
        if begin > len(self._data):
            return begin
        return begin + _LENGTH.unpack_from(self._data, self._at)[0]
