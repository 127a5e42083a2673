"""Messages on a socket, each behind its length.

What has come is read in one go, however many messages that is: to ask the system for each of them
takes longer than most of them take to answer.
"""

import os
import select
import struct
from multiprocessing.connection import Connection

_LENGTH = struct.Struct("<I")
AT_ONCE = 1 << 16
"""Bytes that are read at a time."""


class Letters:
    """One end of a connection."""

    def __init__(self, connection: Connection) -> None:
        """`connection` stays its owner's, who closes it."""
        self._connection = connection
        self._arrived = select.poll()
        self._arrived.register(connection.fileno(), select.POLLIN)
        self._data, self._at = b"", 0

    @property
    def waiting(self) -> bool:
        """Whether a message has been read that was not received yet."""
        return self._end() <= len(self._data)

    def send(self, message: bytes) -> None:
        """Sends a message."""
        rest = _LENGTH.pack(len(message)) + message
        while rest:
            rest = rest[os.write(self._connection.fileno(), rest) :]

    def receive(self, limit: float | None = None) -> bytes:
        """The next message; raises TimeoutError if none comes within `limit` seconds, and EOFError
        when the other end has hung up."""
        while (end := self._end()) > len(self._data):
            # Who sleeps in a read is woken by every message that the other end takes: hence poll.
            if limit is not None and not self._arrived.poll(1000 * limit):
                raise TimeoutError
            came = os.read(self._connection.fileno(), AT_ONCE)
            if not came:
                raise EOFError
            self._data, self._at = self._data[self._at :] + came, 0
        message = self._data[self._at + _LENGTH.size : end]
        self._at = end
        return message

    def _end(self) -> int:
        """Where the next message ends, as far as that is known."""
        begin = self._at + _LENGTH.size
        if begin > len(self._data):
            return begin
        return begin + _LENGTH.unpack_from(self._data, self._at)[0]
