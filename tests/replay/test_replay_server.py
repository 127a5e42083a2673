"""Servers end with whoever started them, say how they ended, and lose nothing acknowledged."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from survival import RESUMES, survives

from dovetail.errors import UserError
from dovetail.replay import (
    Address,
    History,
    HostTable,
    Prioritized,
    RateLimiter,
    ReplayClient,
    ReplayServer,
    ReplayShards,
    Table,
    Transitions,
)
from dovetail.replay.storage.save import load, save

ROW = {"observation": np.zeros(2, np.float32), "reward": np.zeros((), np.float32)}
TABLE = Table(Transitions(2), 40, Prioritized())
FRAMES = Table(Transitions(), 40, Prioritized(), history=(History("observation", 2),))
PARENT = """
import os, time
import numpy as np
from dovetail.replay import ReplayServer, Table
server = ReplayServer(Table(capacity=8), {"x": np.zeros(2)}, 1)
print(server.address.pid, server.address.folder, flush=True)
time.sleep(60)
"""


def rows(seed: int, length: int = 3) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "observation": random.random((length, 2, 2), np.float32),
        "reward": random.random((length, 2), np.float32),
    }


def wait_until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def insert_for_ever(client: ReplayClient) -> None:
    wait_until(lambda: client.insert(rows(0)) is not None)


# How servers end.


def test_a_killed_server_is_named_with_its_signal() -> None:
    with ReplayServer(TABLE, ROW, 2) as server:
        client, stranger = server.client(), ReplayClient(server.address, ROW)
        client.insert(rows(0))
        client.flush()
        os.kill(server.address.pid, signal.SIGKILL)
        with pytest.raises(UserError, match=f"process {server.address.pid}. was ended by signal 9"):
            client.sample(np.zeros(4))
        with pytest.raises(UserError, match="does not answer: start another to go on"):
            stranger.sample(np.zeros(4))
        with pytest.raises(UserError, match="was ended by signal 9"):
            server.client()


def test_a_server_that_fails_is_named_with_its_traceback() -> None:
    with ReplayServer(TABLE, ROW, 2) as server:
        client = server.client()
        state = client.state()
        state["0/numbers"][:] = np.nan  # a table that cannot be
        with pytest.raises(UserError, match="has ended with code 1.*\n(.*\n)*.*ValueError: "):
            client.load(state)
            insert_for_ever(client)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_parent_dies(end: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        assert not is_gone(int(pid)) and Path(folder).exists()
        parent.send_signal(end)
        wait_until(lambda: is_gone(int(pid)))
    assert not Path(folder).exists()


def test_a_server_that_is_told_to_end_tells_those_who_wait() -> None:
    with ReplayServer(TABLE, ROW, 2, RateLimiter(100)) as server:
        client = server.client()
        with client.samples(4):
            os.kill(server.address.pid, signal.SIGTERM)
            with pytest.raises(UserError, match="has ended with code 0|has been closed"):
                insert_for_ever(client)
            wait_until(lambda: is_gone(server.address.pid))
        assert not Path(server.address.folder).exists()


def test_the_process_of_a_server_imports_no_jax() -> None:
    check = "import sys; import dovetail.replay.service.process; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# Who may, and who waits.


def test_an_address_goes_to_other_processes_as_text() -> None:
    with ReplayServer(TABLE, ROW, 2) as server:
        address = Address.from_text(server.address.text())
        assert address == server.address
        with ReplayClient(address, ROW) as client:
            client.insert(rows(0))
            assert client.size == 2
        with pytest.raises(UserError, match="does not know the client's key"):
            ReplayClient(replace(address, key="00" * 32), ROW)
        with pytest.raises(UserError, match=r"are x float64\[3\], but those of the replay"):
            ReplayClient(address, {"x": np.zeros(3)})


def test_waits_end_and_say_what_for() -> None:
    with ReplayServer(TABLE, ROW, 2, RateLimiter(9)) as server, server.client() as client:
        client.insert(rows(0))
        with pytest.raises(UserError, match=r"waited 0.05 s to sample 4 items: sampling waits"):
            client.sample(np.zeros(4), timeout=0.05)
        with pytest.raises(UserError, match="41 items was asked of a replay table that holds 40"):
            client.sample(np.zeros(41))
        waiting = server.client()
        found: list[str] = []

        def sample() -> None:
            try:
                waiting.sample(np.zeros(4))
            except UserError as error:
                found.append(str(error))

        thread = threading.Thread(target=sample)
        thread.start()
        client.close()
        thread.join(20)
        assert found == [
            "Replay has nobody left to insert: sampling waits for 9 items, of which 2 are "
            "inserted; inserting 1 may go on."
        ]


def test_an_insert_that_fails_takes_those_behind_it_along() -> None:
    """No gap is left in a stream that the client does not know of."""
    limiter = RateLimiter(2, samples_per_insert=1.0, tolerance=20.0)
    with ReplayServer(TABLE, ROW, 2, limiter) as server, server.client() as client:
        for seed in range(3):
            client.insert(rows(seed))
        client.flush()
        assert client.counts() == {"size": 14, "inserted": 14, "sampled": 0}
        for seed in range(3, 8):
            client.insert(rows(seed), timeout=0.3)
        with pytest.raises(UserError) as raised:
            client.flush()
        assert str(raised.value) == (
            "Replay waited 0.3 s to insert 6 items: sampling 1 may go on; inserting 6 waits for 4 "
            "more items to be sampled. 3 more that had been sent behind it were left out."
        )
        assert client.acknowledged == 4
        client.sample(np.linspace(0, 0.9, 10))
        client.insert(rows(9))
        assert client.counts() == {"size": 26, "inserted": 26, "sampled": 10}


@pytest.mark.parametrize("bad", [float("nan"), -1.0])
def test_what_is_wrong_is_said_where_it_was_done(bad: float) -> None:
    with ReplayServer(TABLE, ROW, 2) as server, server.client() as client:
        with pytest.raises(UserError, match=f"A priority is {bad}"):
            client.insert(rows(0), priorities=np.full((3, 2), bad))
        with pytest.raises(UserError, match="lacks 'reward' of the table's rows"):
            client.insert({"observation": rows(0)["observation"]})
        client.insert(rows(0))
        sample = client.sample(np.zeros(2))
        with pytest.raises(UserError, match=f"A priority is {bad}"):
            client.update_priorities(sample.keys, np.full(2, bad))


def test_options_that_cannot_be_are_refused_before_anything_starts() -> None:
    with pytest.raises(UserError, match="capacity is 1 items for 2 environments"):
        ReplayServer(Table(capacity=1), ROW, 2)
    with pytest.raises(UserError, match="by 3 servers: give from 1 to"):
        ReplayShards(TABLE, ROW, 2, 3)


# Ahead of time, and from several.


def test_samples_ahead_of_time_are_those_of_their_draws() -> None:
    with ReplayServer(TABLE, ROW, 2) as server, server.client() as client:
        client.insert(rows(0, 9))
        client.flush()
        random = np.random.default_rng(5)
        with client.samples(4, seed=5, ahead=3) as samples:
            for _ in range(10):
                found = next(samples)
                wanted = client.sample(random.random(4, np.float32))
                np.testing.assert_array_equal(found.keys.number, wanted.keys.number)
                np.testing.assert_array_equal(found.rows["observation"], wanted.rows["observation"])


def test_clients_in_threads_share_shards() -> None:
    limiter = RateLimiter(8, samples_per_insert=2.0, tolerance=24.0)
    with ReplayShards(Table(capacity=64), ROW, 2, 2, limiter) as shards:
        failures: list[BaseException] = []

        def insert(env: int) -> None:
            with shards.client() as client:
                for seed in range(60):
                    part = {name: x[:, :1] for name, x in rows(seed, 1).items()}
                    client.insert(part, envs=(env, env + 1))

        def sample() -> None:
            with shards.client() as client, client.samples(4, ahead=0) as samples:
                for _ in range(52):
                    next(samples)

        def guarded(work: Any, *arguments: int) -> None:
            try:
                work(*arguments)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=guarded, args=(insert, env)) for env in (0, 1)]
        threads += [threading.Thread(target=guarded, args=(sample,))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failures
        with shards.client() as client:
            counts = client.counts()
            assert counts["inserted"] == 118 and 208 <= counts["sampled"] <= 212
            with pytest.raises(UserError, match="1 items was asked of 2 replay servers"):
                client.sample(np.zeros(1))


# What is kept.


@survives(
    "a durable replay server is killed",
    "any",
    "replay servers",
    RESUMES + ", with everything acknowledged",
)
@pytest.mark.parametrize("table", [TABLE, FRAMES])
def test_nothing_acknowledged_is_lost_when_the_server_is_killed(
    table: Table, tmp_path: Path
) -> None:
    with ReplayServer(table, ROW, 2, durable=tmp_path, grown=30_000) as server:
        client, sent = server.client(), 0
        killer = threading.Timer(0.3, os.kill, (server.address.pid, signal.SIGKILL))
        with pytest.raises(UserError, match="was ended by signal 9"):
            for seed in range(1_000_000):
                client.insert(**inserted(seed))
                sent = seed + 1
                if seed == 100:
                    changed(client, seed)
                    killer.start()
        acknowledged, epoch = client.acknowledged, client.epoch
    assert 100 < acknowledged <= sent
    with ReplayServer(table, ROW, 2, durable=tmp_path) as again, again.client() as client:
        assert again.lost is None and again.epoch == client.epoch == epoch
        found = client.state()
        inserted_items = int(found.pop("0/limiter")[0])
    plain = HostTable(table, ROW, 2)
    for seed in range(sent + 1):
        if seed >= acknowledged and plain.completed == inserted_items:
            break
        plain.insert(**inserted(seed))
        if seed == 100:
            changed(plain, seed)
    assert seed >= acknowledged and plain.completed == inserted_items
    assert plain.index is not None
    there = plain.index.live
    again_here = HostTable(table, ROW, 2)
    load(again_here, {name.removeprefix("0/"): x for name, x in found.items()})
    for name, array in save(plain).items():
        items = there if name.startswith("index/") and not name.endswith("live") else ...
        if "/frames" not in name:  # of those that no item needs any more, some may be newer
            np.testing.assert_array_equal(found[f"0/{name}"][items], array[items], err_msg=name)
    draws = np.linspace(0, 0.999, plain.size)
    left, right = again_here.sample(draws), plain.sample(draws)
    for name, rows in left.rows.items():
        np.testing.assert_array_equal(rows[left.mask], right.rows[name][right.mask], err_msg=name)


def inserted(seed: int) -> dict[str, Any]:
    """An insert, told by its number; every tenth ends an episode."""
    random = np.random.default_rng(seed)
    ends = np.full((3, 2), False)
    ends[1, seed % 2] = seed % 10 == 0
    given = {"rows": rows(seed), "ends": ends, "priorities": random.random((3, 2), np.float32)}
    if seed % 10 == 0:
        given["final"] = {"observation": random.random((3, 2, 2), np.float32)}
    return given


def changed(table: Any, seed: int) -> None:
    """A sample and a change of its priorities, told by a number."""
    sample = table.sample(np.random.default_rng(seed).random(4))
    table.update_priorities(sample.keys, np.array([3.0, 5.0, 0.5, 7.0], np.float32))


def test_a_server_keeps_its_epoch_unless_data_are_lost(tmp_path: Path) -> None:
    def epoch(damage: bool = False) -> int:
        with ReplayServer(TABLE, ROW, 2, durable=tmp_path / "kept") as server:
            with server.client() as client:
                client.insert(rows(0))
            assert (server.lost is not None) == damage
            return server.epoch

    first = epoch()
    assert epoch() == first
    (log,) = (tmp_path / "kept").glob("log-*")
    data = bytearray(log.read_bytes())
    data[-40] ^= 1
    log.write_bytes(data)
    assert epoch(damage=True) == first + 1
    with ReplayServer(TABLE, ROW, 2) as one, ReplayServer(TABLE, ROW, 2) as other:
        assert one.epoch != other.epoch


def test_a_folder_of_other_options_is_refused(tmp_path: Path) -> None:
    ReplayServer(TABLE, ROW, 2, durable=tmp_path).close()
    with pytest.raises(UserError, match="a replay table of other options .envs 2, not 3"):
        ReplayServer(TABLE, ROW, 3, durable=tmp_path)


def test_a_state_that_was_loaded_is_kept(tmp_path: Path) -> None:
    with ReplayServer(TABLE, ROW, 2) as server, server.client() as client:
        client.insert(rows(0, 9))
        state = client.state()
    with ReplayServer(TABLE, ROW, 2, durable=tmp_path) as server, server.client() as client:
        client.insert(rows(1))
        client.load(state)
        client.insert(rows(2))
        wanted = client.state()
    with ReplayServer(TABLE, ROW, 2, durable=tmp_path) as server, server.client() as client:
        found = client.state()
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("length", [1, 300])
@pytest.mark.parametrize("given", [False, True])
def test_check_sums_that_clients_make_are_those_of_the_log(
    tmp_path: Path, length: int, given: bool
) -> None:
    """Of small inserts and of those that are checked by blocks, with priorities and without."""
    table = Table(Transitions(), 4000, Prioritized())
    row = {"observation": np.zeros(8, np.float32), "reward": np.zeros((), np.float32)}
    with ReplayServer(table, row, 2, durable=tmp_path) as server:
        client = server.client()
        for seed in range(3):
            random = np.random.default_rng(seed)
            steps = {
                "observation": random.random((length, 2, 8), np.float32),
                "reward": random.random((length, 2), np.float32),
            }
            priorities = random.random((length, 2), np.float32) if given else None
            client.insert(steps, priorities=priorities)
        size, sample = client.size, client.sample(np.linspace(0, 0.9, 4)).rows["reward"].tolist()
        os.kill(server.address.pid, signal.SIGKILL)
    with ReplayServer(table, row, 2, durable=tmp_path) as server, server.client() as client:
        assert server.lost is None and server.records == 4
        assert client.size == size == 6 * length - 2
        assert client.sample(np.linspace(0, 0.9, 4)).rows["reward"].tolist() == sample
