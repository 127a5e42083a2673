"""How a replay server and its clients talk: short messages on a socket, arrays in shared memory.

A client opens a channel for each thing it does, so that what waits in one holds up no other. What
goes through the socket is what is asked for, a few numbers in fixed places, and short arrays;
whoever does not know the server's key is not let in. On one machine rows and samples lie in memory
that client and server both map, without a name: whoever dies, nothing is left of it. Over TCP they
travel inside the messages, in the same order.
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
from dovetail.replay.service.framing import LONG, SHORT, Letters

Array = np.ndarray[Any, np.dtype[Any]]

INSERT, SAMPLE, UPDATE, COUNTS, STATE, LOAD = b"i", b"s", b"u", b"c", b"d", b"l"
MEMORY, READY = b"m", b"r"
"""What a client asks for. Memory is handed over when whoever takes it is ready: nothing else may be
on its way then."""
DONE, REFUSED = b"\0", b"\1"
"""How an answer begins."""
INSERT_HEAD = struct.Struct("<QIdI")
"""Where the arrays are, how many failures the client knows of, its time limit (NaN: none), and the
check sum of what a log has of it, where the client makes it."""
SAMPLE_HEAD = struct.Struct("<QIIId2s?")
"""Where to, items of the whole batch, from which to which, the time limit, the draws' type, and
whether a table without items answers at once."""
UPDATE_HEAD = struct.Struct("<I")
SIZE = struct.Struct("<Q")
COUNT = struct.Struct("<I")
"""How many inserts are acknowledged."""
GRACE = 30.0
"""Seconds beyond its own time limit after which a server that does not answer counts as hung."""
PIECE = 1 << 26
"""Bytes of a state that are in one message."""


def create(size: int) -> int:
    """A file descriptor of new memory that no folder shows."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("dovetail-replay")
    else:
        descriptor, name = tempfile.mkstemp(prefix="dovetail-")
        os.unlink(name)
    os.ftruncate(descriptor, size)
    return descriptor


def attach(descriptor: int, size: int) -> mmap.mmap:
    """That memory, mapped here for as long as any array looks at it."""
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
        """Whether arrays lie in memory that both see."""
        self._letters = Letters(self._connection, SHORT if self.shares else LONG)
        self.send(json.dumps(hello).encode())
        self.welcome: dict[str, Any] = json.loads(self.receive("the first answer"))

    def send(self, message: bytes, arrays: memoryview | None = None) -> None:
        """Sends a message, with `arrays` in it where memory is not shared."""
        try:
            self._letters.send(message, None if self.shares else arrays)
        except OSError as error:
            raise self._gone() from error

    def share(self, descriptor: int, size: int) -> None:
        """Lets the server see memory, instead of what it saw before, where it can."""
        if not self.shares:
            return
        self.send(MEMORY + SIZE.pack(size))
        self.receive("shared memory")
        send_handle(self._connection, descriptor, self._address.pid)
        self.receive("shared memory")

    def receive(self, what: str, timeout: float | None = None) -> bytes:
        """The next answer; what the server refused is raised."""
        if timeout is not None:
            self._limit = timeout
        limit = self._limit + GRACE
        try:
            answer = self._letters.receive(limit)
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
        """Memory of a size that the server made: mapped, or as it comes."""
        self.send(READY)
        if self.shares:
            return attach(recv_handle(self._connection), size)
        found = bytearray()
        while len(found) < size:
            found += self.receive("the state")
        return found

    def close(self) -> None:
        """Hangs up."""
        self._connection.close()

    def _gone(self, end: str = "has gone") -> UserError:
        return ServerGone(self._address.epitaph(end) if self._why is None else self._why())


def pieces(memory: Any, size: int) -> list[memoryview]:
    """Memory in pieces that are each sent in one message."""
    view = memoryview(memory).cast("B")[:size]
    return [view[at : at + PIECE] for at in range(0, size, PIECE)]
