"""How a replay server and its clients talk: short messages on a socket, arrays in shared memory.

A client opens a channel for each thing it does, so that what waits in one holds up no other. What
goes through the socket is what is asked for, a few numbers in fixed places, and short arrays;
whoever does not know the server's key is not let in. Rows and samples lie in memory that client and
server both map, without a name: whoever dies, nothing is left of it.
"""

import json
import mmap
import os
import struct
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Client, Connection
from multiprocessing.context import AuthenticationError
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import UserError
from dovetail.replay.letters import Letters

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
SAMPLE_HEAD = struct.Struct("<QIIId2s")
"""Where to, items of the whole batch, from which to which, the time limit, the draws' type."""
UPDATE_HEAD = struct.Struct("<I")
SIZE = struct.Struct("<Q")
COUNT = struct.Struct("<I")
"""How many inserts are acknowledged."""
GRACE = 30.0
"""Seconds beyond its own time limit after which a server that does not answer counts as hung."""


@dataclass(frozen=True)
class Address:
    """Where a replay server is found, on this machine, and the key that it asks for."""

    folder: str
    key: str
    pid: int
    """Its process."""

    def text(self) -> str:
        """As text, to be handed to another process; who has it has access."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> "Address":
        """From that text."""
        return Address(**json.loads(text))

    @property
    def socket(self) -> str:
        """The socket's path."""
        return str(Path(self.folder) / "socket")

    @property
    def errors(self) -> Path:
        """The file that has the server's last words."""
        return Path(self.folder) / "errors.txt"


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


class Channel:
    """A client's end of a connection to a server."""

    def __init__(
        self,
        address: Address,
        hello: dict[str, Any],
        timeout: float,
        why: Callable[[], str] | None = None,
    ) -> None:
        self._address, self._why = address, why
        try:
            self._connection: Connection = Client(
                address.socket, "AF_UNIX", bytes.fromhex(address.key)
            )
        except AuthenticationError as error:
            raise UserError(
                f"The replay server (process {address.pid}) does not know the client's key: "
                "connect to the address that the server gave."
            ) from error
        except (OSError, EOFError) as error:
            raise self._gone() from error
        self._limit = timeout
        self._letters = Letters(self._connection)
        self.send(json.dumps(hello).encode())
        self.welcome: dict[str, Any] = json.loads(self.receive("the first answer"))

    def send(self, message: bytes) -> None:
        """Sends a message."""
        try:
            self._letters.send(message)
        except OSError as error:
            raise self._gone() from error

    def share(self, descriptor: int, size: int) -> None:
        """Lets the server see memory, instead of what it saw before."""
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
            raise UserError(
                f"The replay server (process {self._address.pid}) has not answered for "
                f"{limit:g} s, when asked for {what}: look what it does, or start it anew."
            ) from None
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if answer[:1] == DONE:
            return answer[1:]
        raise UserError(answer[1:].decode())

    def receive_memory(self) -> int:
        """A file descriptor of memory that the server made."""
        self.send(READY)
        return recv_handle(self._connection)

    def close(self) -> None:
        """Hangs up."""
        self._connection.close()

    def _gone(self) -> UserError:
        if self._why is not None:
            return UserError(self._why())
        return UserError(epitaph(self._address, "has gone"))


def epitaph(address: Address, end: str) -> str:
    """That a server has ended, and what it said last."""
    try:
        words = address.errors.read_text(errors="replace").strip()
    except OSError:
        words = ""
    sentence = f"The replay server (process {address.pid}) {end}: start another to go on."
    return f"{sentence} Its last words:\n{words[-2000:]}" if words else sentence
