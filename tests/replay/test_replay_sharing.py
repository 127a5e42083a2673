"""Several writers of one served table, and episodes that are broken off."""

import os
import socket
import struct
import threading
from multiprocessing import Pipe
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.errors import UserError
from dovetail.replay import HostTable, ReplayClient, ReplayServer
from dovetail.replay.device import table as device
from dovetail.replay.service.address import Address
from dovetail.replay.service.claims import Claims
from dovetail.replay.service.framing import AT_ONCE, MessageStream
from dovetail.replay.table import Episodes, History, Prioritized, Sequences, Table, Transitions

ROW = {"x": np.zeros(2, np.float32)}
ENVS = 3
TABLES = {
    "one step": Table(Transitions(1), 30),
    "transitions": Table(Transitions(2), 30),
    "prioritized": Table(Transitions(3), 30, Prioritized(1.0)),
    "sequences": Table(Sequences(3, 1), 30),
    "episodes": Table(Episodes(4), 30),
    "frames": Table(Transitions(2), 30, history=(History("x", 2, 0),)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_an_episode_that_is_broken_off_ends_as_on_the_device(name: str) -> None:
    table, random = TABLES[name], np.random.default_rng(1)
    host, state = HostTable(table, ROW, ENVS), device.init(table, ROW, ENVS)
    streams = jnp.arange(ENVS)
    for turn in range(4):
        rows = {"x": random.random((3, ENVS, 2)).astype(np.float32)}
        ends = random.random((3, ENVS)) < 0.2
        broken = np.array([turn == 2, True, False])
        host.insert(rows, ends=ends, final=rows, broken=broken)
        state = device.break_off(table, state, jnp.asarray(broken), streams)
        state = device.insert(table, state, rows, ends, None, rows)
        if host.size == 0:
            continue
        draws = np.linspace(0, 0.99, 12).astype(np.float32)
        found = host.sample(draws)
        state, expected = device.sample(table, state, jnp.asarray(draws))
        np.testing.assert_array_equal(found.mask, expected.mask)
        seen = np.asarray(found.mask)
        np.testing.assert_array_equal(found.rows["x"][seen], np.asarray(expected.rows["x"])[seen])
    assert host.size > 0


def test_what_was_broken_off_is_restored(tmp_path: Any) -> None:
    table = TABLES["transitions"]
    rows = {"x": np.ones((4, ENVS, 2), np.float32)}
    masks: list[Any] = []
    for _ in range(2):
        with ReplayServer(table, ROW, ENVS, durable=tmp_path) as server, server.client() as client:
            if not masks:
                client.insert(rows)
                client.insert(rows, broken=np.ones(ENVS, bool))
            masks.append(client.sample(np.linspace(0, 0.99, 20)).mask.copy())
    np.testing.assert_array_equal(*masks)
    assert not masks[0].all(axis=1).any()  # the row behind an item is never a step of it


def test_writers_get_streams_of_their_own() -> None:
    claims = Claims(8)
    one, other = object(), object()
    assert claims.claim(one, 4, 4) == 4
    assert claims.claim(other, 4, 4) == 0
    with pytest.raises(UserError, match="Environments 4 to 8 of the replay are another writer's"):
        claims.check(other, 3, 5)
    claims.release(one)
    assert claims.claim(object(), 2, 6) == 6


def test_a_table_without_room_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.replay.service.claims.PATIENCE", 0.01)
    claims = Claims(4)
    claims.claim(object(), 3, 0)
    with pytest.raises(UserError, match="room for 4 environments, of which 3 are other writers'"):
        claims.claim(object(), 2, 0)


def test_a_message_that_says_to_be_endless_is_not_waited_for() -> None:
    here, there = Pipe()
    with here, there:
        os.write(there.fileno(), struct.pack("<Q", 1 << 40))
        with pytest.raises(EOFError, match="a message of"):
            MessageStream(here).receive(limit=5.0)


def test_long_and_short_messages_arrive_whole() -> None:
    here, there = Pipe()
    with here, there:
        sent = [b"x" * size for size in (0, 1, AT_ONCE, 3 * AT_ONCE, 5)]
        sender, taker = MessageStream(there), MessageStream(here)
        writing = threading.Thread(target=lambda: [sender.send(b"", memoryview(m)) for m in sent])
        writing.start()
        assert [taker.receive(5.0) for _ in sent] == sent
        writing.join()


def test_who_shows_no_key_is_not_let_in_and_holds_up_nobody() -> None:
    with ReplayServer(Table(), ROW, 2, listen="127.0.0.1:0") as server:
        assert server.remote is not None
        place = (server.remote.host, server.remote.port)
        with socket.create_connection(place) as silent, socket.create_connection(place) as wrong:
            wrong.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
            with ReplayClient(server.remote, ROW) as client:
                assert client.size == 0
            assert silent.fileno() > 0
        assert server.runs


def test_two_writers_share_a_server() -> None:
    rows = {"x": np.ones((3, 2, 2), np.float32)}
    with ReplayServer(Table(Transitions(), 100), ROW, 4, listen="127.0.0.1:0") as server:
        assert server.remote is not None
        shown = Address.from_text(server.remote.shown())  # the key is in the server's folder
        with ReplayClient(shown, ROW) as one, server.client() as other:
            places = {client.claim(2) for client in (one, other)}
            assert places == {0, 2}
            one.insert(rows, envs=(0, 2))
            other.insert(rows, envs=(2, 4))
            one.flush()
            other.flush()
            assert one.size == other.size == 8
            one.insert(rows, envs=(1, 3))
            with pytest.raises(UserError, match="are another writer's"):
                one.flush()
