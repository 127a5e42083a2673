"""Addresses of replay servers, and authentication.

An address is a folder with a Unix socket on this machine, or a host and a port. Its text form can
be passed around: the key is in a file readable only by its owner, or in an environment variable,
never in the text. Clients without the key are refused; traffic over TCP is not encrypted.
"""

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.context import AuthenticationError
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from dovetail.errors import UserError

KEY = "DOVETAIL_REPLAY_KEY"
"""Environment variable with the key, for addresses that name no key file."""
HANDSHAKE = 10.0
"""Time limit in seconds for authentication, on both ends."""


@dataclass(frozen=True)
class Address:
    """Where to reach a replay server, and the key it requires."""

    folder: str
    """On its machine: its socket, key and error log."""
    key: str
    pid: int = 0
    """Its process id."""
    host: str = ""
    port: int = 0
    """TCP port; 0 to use the socket in its folder."""

    def text(self) -> str:
        """As text including the key, to hand to another process; the text grants access."""
        return json.dumps(asdict(self))

    def shown(self, key_file: str = "") -> str:
        """As text without the key, which is in `key_file`; by default, the one in the folder."""
        if not self.remote:
            return f"unix:{self.folder}"
        return f"tcp://{self.host}:{self.port}?key={key_file or Path(self.folder) / 'key'}"

    @staticmethod
    def from_text(text: str) -> "Address":
        """Parses either text form."""
        if text.startswith("{"):
            return Address(**json.loads(text))
        if text.startswith("unix:"):
            folder = text.removeprefix("unix:")
            return Address(folder, read_key(Path(folder) / "key", text))
        try:
            found = urlsplit(text if "://" in text else f"tcp://{text}")
            host, port = found.hostname, found.port
        except ValueError:
            found, host, port = urlsplit(""), None, None
        if found.scheme != "tcp" or not host or not port:
            raise UserError(
                f"{text!r} is no address of a replay: write unix:FOLDER or tcp://HOST:PORT?key=FILE"
                ", as `dovetail replay` shows it, or learner or servers."
            )
        file = parse_qs(found.query).get("key", [""])[0]
        key = read_key(Path(file), text) if file else os.environ.get(KEY, "")
        if not key:
            raise UserError(
                f"The address {text} names no key: write {text}?key=FILE, or set {KEY}."
            )
        return Address("", key, host=host, port=port)

    @property
    def remote(self) -> bool:
        """Whether it is reached over TCP."""
        return self.port > 0

    @property
    def name(self) -> str:
        """Name for messages."""
        if self.remote:
            return f"{self.host}:{self.port}"
        return f"process {self.pid}" if self.pid else self.folder

    @property
    def socket(self) -> str:
        """Path of the socket."""
        return str(Path(self.folder) / "socket")

    def end_message(self, end: str = "has gone") -> str:
        """A sentence saying that the server has ended, with its last errors."""
        try:
            words = (Path(self.folder) / "errors.txt").read_text(errors="replace").strip()
        except OSError:
            words = ""
        sentence = f"The replay server ({self.name}) {end}: start another to go on."
        return f"{sentence} Its last words:\n{words[-2000:]}" if words else sentence


def read_key(path: Path, address: str) -> str:
    """Reads a key from a file."""
    try:
        key = path.read_text(encoding="utf-8").strip()
        bytes.fromhex(key)
        return key
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it holds no key"
        raise UserError(
            f"The key of the replay at {address} cannot be read from {path} ({why}): is it served, "
            "and is the file the server's?"
        ) from error


def write_key(path: Path, key: str) -> None:
    """Writes a key to a file that only its owner can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    # Private from the start: a later chmod would leave a moment in which others can read it.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"{key}\n")


def connect(address: Address, gone: Callable[[], UserError]) -> Connection:
    """A mutually authenticated connection; raises `gone()` if the server does not answer."""
    opened = socket.socket(socket.AF_UNIX)
    try:
        if address.remote:
            opened.close()
            opened = socket.create_connection((address.host, address.port), HANDSHAKE)
            opened.settimeout(None)
            at_once(opened)
        else:
            opened.connect(address.socket)
    except OSError as error:
        opened.close()
        raise gone() from error
    connection = Connection(opened.detach())
    key = bytes.fromhex(address.key)
    try:
        with limited(connection.fileno()):
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
        return connection
    except AuthenticationError as error:
        connection.close()
        raise UserError(
            f"The replay server ({address.name}) does not know the client's key: connect to the "
            "address that the server gave."
        ) from error
    except (OSError, EOFError) as error:
        connection.close()
        raise gone() from error


def welcome(connection: Connection, key: bytes) -> None:
    """The server's part of the authentication: refuses clients without the key in time.

    All of it has `HANDSHAKE` seconds: a client that sends byte by byte gets no more.
    """
    descriptor = os.dup(connection.fileno())
    late = threading.Timer(HANDSHAKE, _hang_up, (descriptor,))
    late.daemon = True
    late.start()
    try:
        with limited(connection.fileno()):
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
    finally:
        late.cancel()
        os.close(descriptor)


def _hang_up(descriptor: int) -> None:
    """Ends a connection, so that whoever reads from it stops."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as opened:
        opened.shutdown(socket.SHUT_RDWR)


def at_once(opened: socket.socket) -> None:
    """Disables Nagle's algorithm, so that short messages are sent at once."""
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@contextmanager
def limited(descriptor: int) -> Generator[None]:
    """Bounds every read from a socket until the other end is authenticated."""

    def limit(seconds: float) -> None:
        """Sets a kernel timeout: `settimeout` would make the socket non-blocking."""
        with socket.socket(fileno=os.dup(descriptor)) as opened:
            bound = struct.pack("ll", int(seconds), 0)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)

    limit(HANDSHAKE)
    yield
    limit(0.0)
