"""Where a replay server is found, and how a client gets in.

An address is a folder with a Unix socket on this machine, or a host and a port. As text it can be
passed on: the key is in a file that only its owner reads, or in the environment, never in the
text. Who does not know the key is not let in; over TCP what is sent is not encrypted.
"""

import json
import os
import socket
import struct
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.context import AuthenticationError
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from dovetail.errors import UserError

KEY = "DOVETAIL_REPLAY_KEY"
"""The environment's variable that has the key of an address that names no file."""
HANDSHAKE = 10.0
"""Seconds in which a server must let a client in, and a client must show its key."""


@dataclass(frozen=True)
class Address:
    """Where a replay server is found, and the key that it asks for."""

    folder: str
    """On its machine: its socket, its key and its last words."""
    key: str
    pid: int = 0
    """Its process."""
    host: str = ""
    port: int = 0
    """Where it is reached over TCP; 0 if by the socket in its folder."""

    def text(self) -> str:
        """As text with the key, to be handed to another process; who has it has access."""
        return json.dumps(asdict(self))

    def shown(self, key_file: str = "") -> str:
        """As text without the key, which is in a file: of the folder unless given."""
        if not self.remote:
            return f"unix:{self.folder}"
        return f"tcp://{self.host}:{self.port}?key={key_file or Path(self.folder) / 'key'}"

    @staticmethod
    def from_text(text: str) -> "Address":
        """From either text."""
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
        """What people know it by."""
        if self.remote:
            return f"{self.host}:{self.port}"
        return f"process {self.pid}" if self.pid else self.folder

    @property
    def socket(self) -> str:
        """The socket's path."""
        return str(Path(self.folder) / "socket")

    def epitaph(self, end: str = "has gone") -> str:
        """That the server has ended, and what it said last."""
        try:
            words = (Path(self.folder) / "errors.txt").read_text(errors="replace").strip()
        except OSError:
            words = ""
        sentence = f"The replay server ({self.name}) {end}: start another to go on."
        return f"{sentence} Its last words:\n{words[-2000:]}" if words else sentence


def read_key(path: Path, address: str) -> str:
    """The key in a file."""
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
    """A key in a file that only its owner can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"{key}\n")


def connect(address: Address, gone: Callable[[], UserError]) -> Connection:
    """A connection that both ends have shown the key on; `gone` says what to raise if nobody
    answers."""
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
    """The server's part of that: who does not show the key in time is not let in."""
    with limited(connection.fileno()):
        deliver_challenge(connection, key)
        answer_challenge(connection, key)


def at_once(opened: socket.socket) -> None:
    """Has short messages sent at once."""
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@contextmanager
def limited(descriptor: int) -> Generator[None]:
    """Bounds every read of a socket while the other end is not known."""

    def limit(seconds: float) -> None:
        """A bound of the system's own: `settimeout` would make the socket another kind."""
        with socket.socket(fileno=os.dup(descriptor)) as opened:
            bound = struct.pack("ll", int(seconds), 0)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)

    limit(HANDSHAKE)
    yield
    limit(0.0)
