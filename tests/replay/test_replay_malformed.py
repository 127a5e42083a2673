"""A server outlives what its clients send: strangers, the slow, and those who know the key."""

import os
import random
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from survival import GOES_ON, survives

from dovetail.errors import UserError
from dovetail.replay import Prioritized, ReplayServer, Table, Transitions
from dovetail.replay.service import address as addresses
from dovetail.replay.service.address import Address, connect
from dovetail.replay.service.channel import INSERT_HEAD, SAMPLE_HEAD
from dovetail.replay.service.framing import MessageStream
from dovetail.replay.service.messages import PLAIN, InsertHead

ROW = {"observation": np.zeros(2, np.float32), "reward": np.zeros((), np.float32)}
TABLE = Table(Transitions(2), 40, Prioritized())
HELLO = b'{"channel": "insert"}'
LENGTH = struct.Struct("<Q")


@pytest.fixture(scope="module", params=["unix", "tcp"])
def server(request: pytest.FixtureRequest) -> Generator[ReplayServer]:
    listen = "127.0.0.1:0" if request.param == "tcp" else None
    with ReplayServer(TABLE, ROW, 2, listen=listen) as started:
        yield started


def place(server: ReplayServer) -> Address:
    return server.address if server.remote is None else server.remote


def send(server: ReplayServer, *messages: bytes) -> None:
    """Sends these as an authenticated client, and waits until the server is done with them."""

    def gone() -> UserError:
        return UserError("the server is gone")

    connection = connect(place(server), gone)
    stream = MessageStream(connection)
    try:
        for message in messages:
            stream.send(message)
        while True:
            stream.receive(0.2)
    except (OSError, EOFError, TimeoutError):
        pass
    finally:
        connection.close()


def assert_serves(server: ReplayServer) -> None:
    """A client with good manners is served."""
    client = server.client()
    client.insert(
        {"observation": np.ones((3, 2, 2), np.float32), "reward": np.ones((3, 2), np.float32)}
    )
    client.flush()
    assert client.sample(np.array([0.5])).size > 0
    client.close()


def insert(*head: int, given: int = PLAIN) -> bytes:
    """An insert of some rows that do not come with it."""
    length, first, last = head
    described = InsertHead(given, length, first, last, ()).packed()
    return b"i" + INSERT_HEAD.pack(0, 0, 1.0, 0) + described


BAD: dict[str, list[bytes]] = {
    "no hello": [b""],
    "no json": [b"\xff\xfe"],
    "nested json": [b"[" * 100_000],
    "no channel": [b"{}"],
    "claims of nothing": [b'{"channel": "insert", "claim": [-3, 0]}'],
    "claims of words": [b'{"channel": "insert", "claim": "all"}'],
    "no request": [HELLO, b""],
    "unknown request": [HELLO, b"?what"],
    "short insert": [HELLO, b"i123"],
    "insert for others": [HELLO, insert(1, 5, 9)],
    "insert backwards": [HELLO, insert(1, 2, 0)],
    "insert without end": [HELLO, insert(2**31, 0, 2)],
    "insert of every array": [HELLO, insert(3, 0, 2, given=255)],
    "short sample": [HELLO, b"s1"],
    "sample of objects": [HELLO, b"s" + SAMPLE_HEAD.pack(0, 1, 0, 1, 1.0, b"|O", True) + bytes(8)],
    "sample of too much": [
        HELLO,
        b"s" + SAMPLE_HEAD.pack(0, 2**32 - 1, 0, 1, 1.0, b"f4", True) + bytes(4),
    ],
    "draws of nothing": [
        HELLO,
        b"s" + SAMPLE_HEAD.pack(0, 1, 0, 1, 1.0, b"f4", True) + struct.pack("<f", np.nan),
    ],
    "items far away": [HELLO, b"u" + struct.pack("<Iqqf", 1, 2**40, 1, 1.0)],
    "short update": [HELLO, b"u" + struct.pack("<I", 2**31)],
    "state of nothing": [HELLO, b"l{}"],
    "state of words": [HELLO, b'l[["limiter", [2], "O"]]'],
    "memory of nothing": [HELLO, b"m" + LENGTH.pack(2**62)],
}


@survives("a client sends nonsense to a replay server", "any", "replay servers", GOES_ON)
@pytest.mark.parametrize("kind", BAD)
def test_a_malformed_message_ends_its_connection_only(server: ReplayServer, kind: str) -> None:
    send(server, *BAD[kind])
    assert server.runs, server.how_it_ended()


def test_and_good_clients_are_served_after_all_of_them(server: ReplayServer) -> None:
    assert_serves(server)


def test_mutated_messages(server: ReplayServer) -> None:
    real = [message for messages in BAD.values() for message in messages if message]
    for seed in range(40):
        chance = random.Random(seed)
        message = bytearray(chance.choice(real))
        for _ in range(chance.randrange(1, 4)):
            message[chance.randrange(len(message))] = chance.randrange(256)
        send_quickly(server, HELLO, bytes(message))
    assert server.runs, server.how_it_ended()
    assert_serves(server)


def send_quickly(server: ReplayServer, *messages: bytes) -> None:
    """Sends these and leaves."""
    connection = connect(place(server), lambda: UserError("gone"))
    stream = MessageStream(connection)
    try:
        for message in messages:
            stream.send(message)
        stream.receive(0.2)
        stream.receive(0.05)
    except (OSError, EOFError, TimeoutError):
        pass
    connection.close()


def test_a_length_is_not_believed(server: ReplayServer) -> None:
    connection = connect(place(server), lambda: UserError("gone"))
    before = memory_of(server.address.pid)
    os.write(connection.fileno(), LENGTH.pack(2**40))
    time.sleep(0.2)
    assert memory_of(server.address.pid) - before < 100
    connection.close()
    assert_serves(server)


def memory_of(pid: int) -> float:
    """Resident megabytes."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def test_a_stranger_who_sends_byte_by_byte_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "HANDSHAKE", 0.5)
    ours, theirs = socket.socketpair()
    from multiprocessing.connection import Connection

    connection = Connection(theirs.detach())
    import threading

    ended: list[Any] = []

    def serve() -> None:
        try:
            addresses.welcome(connection, b"key")
        except (OSError, EOFError, addresses.AuthenticationError) as error:
            ended.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    began = time.monotonic()
    try:
        while thread.is_alive() and time.monotonic() - began < 20:
            ours.send(b"\0")
            time.sleep(0.1)
    except OSError:
        pass
    thread.join(20)
    ours.close()
    connection.close()
    assert ended and not thread.is_alive()


FEW = """
import resource, time
import numpy as np
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
from dovetail.replay import ReplayServer, Table
with ReplayServer(Table(capacity=8), {"x": np.zeros(2)}, 1) as server:
    print(server.address.text(), flush=True)
    input()
"""


@pytest.mark.slow
def test_a_server_without_file_descriptors_waits_for_some() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FEW], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    place = Address.from_text(process.stdout.readline())
    crowd = []
    for _ in range(60):
        one = socket.socket(socket.AF_UNIX)
        one.settimeout(0.2)
        try:
            one.connect(place.socket)
        except OSError:
            break
        crowd.append(one)
    time.sleep(0.5)
    for one in crowd:
        one.close()
    time.sleep(0.5)
    connect(place, lambda: UserError("gone")).close()
    process.communicate("\n", timeout=30)
