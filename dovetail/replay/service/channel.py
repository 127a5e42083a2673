"""The protocol between a replay server and its clients: short messages on a socket, arrays in
shared memory.

A client opens a separate connection for each kind of request, so that one that waits does not block
the others. The socket carries the request, a few fixed-size numbers, and short arrays; clients
without the server's key are refused. On one machine rows and samples lie in anonymous memory that
client and server both map, so nothing is left behind whichever process dies. Over TCP they travel
inside the messages, in the same layout.
"""

import json
import mmap
import os
import struct
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np

from dovetail.errors import ServerGone, UserError
from dovetail.replay.service.address import Address, connect
from dovetail.replay.service.framing import LONG, SHORT, MessageStream

Array = np.ndarray[Any, np.dtype[Any]]

INSERT, SAMPLE, UPDATE, COUNTS, STATE, LOAD = b"i", b"s", b"u", b"c", b"d", b"l"
MEMORY, READY = b"m", b"r"
"""Request types. Memory is handed over only when the receiver is ready, because nothing else may be
in flight on the socket at that time."""
DONE, REFUSED = b"\0", b"\1"
"""First byte of an answer."""
INSERT_HEAD = struct.Struct("<QIdI")
"""Offset of the arrays, number of failures the client knows of, time limit (NaN: none), and the
check sum of the log record, where the client computes it."""
SAMPLE_HEAD = struct.Struct("<QIIId2s?")
"""Offset of the result, items in the whole batch, first and last item, time limit, dtype of the
draws, and whether an empty table answers at once."""
UPDATE_HEAD = struct.Struct("<I")
SIZE = struct.Struct("<Q")
COUNT = struct.Struct("<I")
"""Number of inserts acknowledged."""
GRACE = 30.0
"""Seconds beyond its own time limit after which a server that does not answer counts as hung."""
PIECE = 1 << 26
"""Bytes of a state per message."""


def create(size: int) -> int:
    """A file descriptor of new anonymous memory."""
    if hasattr(os, "memfd_create"):
        # Anonymous: freed by the kernel with its last user.
        descriptor = os.memfd_create("dovetail-replay")
    else:
        descriptor, name = tempfile.mkstemp(prefix="dovetail-")
        os.unlink(name)
    os.ftruncate(descriptor, size)
    return descriptor


def attach(descriptor: int, size: int) -> mmap.mmap:
    """Maps that memory for as long as any array refers to it."""
    # The mapping outlives its descriptor.
    memory = mmap.mmap(descriptor, size)
    os.close(descriptor)
    return memory


class ServerConnection:
    """A client's end of a connection to a server."""

    def __init__(
        self,
        address: Address,
        hello: dict[str, Any],
        timeout: float,
        why: Callable[[], str] | None = None,
    ) -> None:
        self._address, self._why = address, why
        self._connection: Connection = connect(address, lambda: self._gone("does not answer"))
        self._limit = timeout
        self.shares = not address.remote
        """Whether arrays lie in memory shared with the server."""
        self._messages = MessageStream(self._connection, SHORT if self.shares else LONG)
        self.send(json.dumps(hello).encode())
        self.welcome: dict[str, Any] = json.loads(self.receive("the first answer"))

    def send(self, message: bytes, arrays: memoryview | None = None) -> None:
        """Sends a message, including `arrays` if memory is not shared."""
        try:
            self._messages.send(message, None if self.shares else arrays)
        except OSError as error:
            raise self._gone() from error

    def share(self, descriptor: int, size: int) -> None:
        """Shares memory with the server, replacing any shared before; does nothing over TCP."""
        if not self.shares:
            return
        self.send(MEMORY + SIZE.pack(size))
        self.receive("shared memory")
        send_handle(self._connection, descriptor, self._address.pid)
        self.receive("shared memory")

    def receive(self, what: str, timeout: float | None = None) -> bytes:
        """The next answer; raises a `UserError` if the server refused the request."""
        if timeout is not None:
            self._limit = timeout
        # The server raises at its own limit; only one that hangs needs ours.
        limit = self._limit + GRACE
        try:
            answer = self._messages.receive(limit)
        except TimeoutError:
            raise ServerGone(
                f"The replay server ({self._address.name}) has not answered for "
                f"{limit:g} s, when asked for {what}: look what it does, or start it anew."
            ) from None
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if answer[:1] == DONE:
            return answer[1:]
        raise UserError(answer[1:].decode())

    def receive_memory(self, size: int) -> Any:
        """Memory of `size` bytes made by the server: mapped, or received in pieces."""
        self.send(READY)
        if self.shares:
            return attach(recv_handle(self._connection), size)
        found = bytearray()
        while len(found) < size:
            found += self.receive("the state")
        return found

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def _gone(self, end: str = "has gone") -> UserError:
        return ServerGone(self._address.end_message(end) if self._why is None else self._why())


def pieces(memory: Any, size: int) -> list[memoryview]:
    """Memory split into pieces of one message each."""
    view = memoryview(memory).cast("B")[:size]
    return [view[at : at + PIECE] for at in range(0, size, PIECE)]
