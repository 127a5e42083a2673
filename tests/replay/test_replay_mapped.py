"""Large leaves of a durable table lie in a mapped file: they are there, or it is told."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.errors import UserError
from dovetail.replay import (
    Episodes,
    History,
    HostTable,
    Prioritized,
    ReplayService,
    Sequences,
    Table,
    Transitions,
    Uniform,
)
from dovetail.replay.storage import rows_file, tail
from dovetail.replay.storage.journal import Journal
from dovetail.replay.storage.save import save

ROW = {
    "count": np.zeros((), np.int64),
    "image": np.zeros((3, 5, 2), np.uint8),
    "wide": np.zeros(131, np.int64),
}
ENVS, TIME = 2, 3
TABLES = {
    "uniform": Table(Transitions(2), 20, Uniform(), history=(History("image", 2),)),
    "prioritized": Table(Transitions(2), 20, Prioritized(), history=(History("image", 2),)),
    "tight": Table(Transitions(1), 20, Uniform(), history=(History("image", 2),), spare=0.0),
    "sequences": Table(Sequences(4, 2), 20, Prioritized(), history=(History("image", 2),)),
    "episodes": Table(Episodes(6), 8, Uniform(), history=(History("image", 2),)),
}
PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_replay_mapped import TABLES, made, work
service = made(Path(sys.argv[1]), TABLES["tight"], grown=30_000)
for seed in range(100_000):
    work(service, seed)
    print(seed, flush=True)
"""


def made(folder: Path | None, table: Table, grown: int = 1 << 30) -> ReplayService:
    return ReplayService(HostTable(table, ROW, ENVS), durable=folder, grown=grown)


def rows_of(numbers: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Rows [T, B] whose every leaf tells their number: of an image, the frame before that too."""
    images = np.stack([numbers - 1, numbers], -1) % 251
    return {
        "count": numbers,
        "image": np.broadcast_to(images[:, :, None, None], (*numbers.shape, 3, 5, 2)).astype("u1"),
        "wide": np.broadcast_to(numbers[..., None], (*numbers.shape, 131)).copy(),
    }


def work(service: ReplayService, seed: int) -> None:
    """An insert told by the seed, of which every other one has ends; now and then a sample."""
    random = np.random.default_rng(seed)
    numbers = (seed * TIME + np.arange(TIME)[:, None] + 1000 * np.arange(ENVS)).astype(np.int64)
    ends = valid = final = None
    if seed % 2:
        ends, valid = random.random((TIME, ENVS)) < 0.3, random.random((TIME, ENVS)) < 0.9
        final = rows_of(numbers + 500)
    service.insert(rows_of(numbers), ends, valid, final)
    if seed % 3 == 0 and service.size:
        sample = service.sample(random.random(4))
        service.update_priorities(sample.keys, random.random(4))


def state(service: ReplayService) -> dict[str, Any]:
    limits = (service.limiter.inserted, service.limiter.sampled)
    return {"limits": limits} | {name: x.tolist() for name, x in save(service.table).items()}


def check_items(service: ReplayService) -> None:
    """The leaves of every item say the same."""
    if not service.size:
        return
    for draws in np.linspace(0, 0.999, 30).reshape(-1, 5):
        found = service.table.sample(draws)
        rows = {leaf: x[found.mask] for leaf, x in found.rows.items()}
        assert (rows["wide"] == rows["count"][..., None]).all()
        newest = rows["image"][..., -1]
        assert (newest == (rows["count"] % 251)[..., None, None]).all()


def reopened(folder: Path, table: Table) -> tuple[ReplayService, str | None]:
    again = made(folder, table)
    assert again.restored is not None
    return again, again.restored.lost


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("grown", [1 << 30, 6000])
def test_it_comes_back_as_it_was(tmp_path: Path, name: str, grown: int) -> None:
    plain, durable = made(None, TABLES[name]), made(tmp_path, TABLES[name], grown)
    for seed in range(25):
        work(plain, seed)
        work(durable, seed)
    assert state(durable) == state(plain)
    durable.close()
    again, lost = reopened(tmp_path, TABLES[name])
    assert lost is None and again.epoch == 1
    assert state(again) == state(plain)
    for seed in range(25, 40):
        work(plain, seed)
        work(again, seed)
    assert state(again) == state(plain)


def test_the_log_has_no_large_leaf(tmp_path: Path) -> None:
    durable = made(tmp_path, TABLES["uniform"])
    for seed in range(0, 40, 2):
        work(durable, seed)
    durable.close()
    (log,), (rows,) = tmp_path.glob("log-*"), tmp_path.glob("rows-*")
    assert log.stat().st_size < 0.25 * 20 * TIME * ENVS * 131 * 8
    assert rows.stat().st_size >= durable.table.nbytes - durable.table.streams.rows.block.nbytes


@pytest.mark.parametrize("name", ["uniform", "tight", "prioritized", "sequences", "episodes"])
def test_an_insert_that_was_cut_short_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    durable = made(tmp_path, TABLES[name])
    for seed in range(30):
        work(durable, seed)
    draws = np.linspace(0, 0.99, 8)

    def seen(service: ReplayService) -> list[Any]:
        found = service.table.sample(draws)
        leaves = [found.rows[leaf][found.mask].tolist() for leaf in ("count", "image", "wide")]
        return [service.size, *leaves]

    wanted = seen(durable)
    monkeypatch.setattr(Journal, "insert", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        work(durable, 30)  # its rows are stored, but it is not logged
    monkeypatch.undo()
    assert durable._journal is not None
    durable._journal._folder.lock.close()  # as its process would, by dying
    again, lost = reopened(tmp_path, TABLES[name])
    assert lost is None and again.epoch == 1
    assert seen(again) == wanted
    work(again, 31)
    check_items(again)


def test_nothing_acknowledged_is_lost_when_it_is_killed(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), here], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "80":
                os.kill(process.pid, signal.SIGKILL)
                break
        acknowledged = max([80, *(int(x) for x in process.stdout.read().split())])
    again, lost = reopened(tmp_path, TABLES["tight"])
    assert lost is None and again.epoch == 1
    plain = made(None, TABLES["tight"])
    counts: list[tuple[int, int]] = []
    for seed in range(acknowledged + 2):
        work(plain, seed)
        counts.append((plain.limiter.inserted, plain.limiter.sampled))
    found = (again.limiter.inserted, again.limiter.sampled)
    assert counts[acknowledged] <= found <= counts[acknowledged + 1]
    check_items(again)


@pytest.mark.parametrize("name", ["uniform", "tight", "prioritized", "sequences"])
def test_a_damaged_log_leaves_no_wrong_item(tmp_path: Path, name: str) -> None:
    durable = made(tmp_path, TABLES[name])
    for seed in range(30):
        work(durable, seed)
    durable.close()
    (log,) = tmp_path.glob("log-*")
    data = bytearray(log.read_bytes())
    data[int(len(data) * 0.9)] ^= 1
    log.write_bytes(data)
    again, lost = reopened(tmp_path, TABLES[name])
    assert lost is not None and "fails its check sum" in lost and again.epoch == 2
    check_items(again)
    for seed in range(40, 50):
        work(again, seed)
        check_items(again)
    again.close()
    third, lost = reopened(tmp_path, TABLES[name])
    assert lost is None and third.epoch == 2 and third.size == again.size
    check_items(third)


def test_a_damaged_row_takes_its_items_and_older_ones_of_the_stream(tmp_path: Path) -> None:
    durable = made(tmp_path, TABLES["uniform"], grown=1)
    for seed in range(0, 30, 2):
        work(durable, seed)
    size, oldest = durable.size, int(durable.table.low[0])
    row = int(durable.table.streams.starts[(oldest + 1) % durable.table.layout.slots * ENVS])
    durable.close()
    (rows,) = tmp_path.glob("rows-*")
    data = bytearray(rows.read_bytes())
    data[row * 131 * 8 + 5] ^= 64  # of the stream's second item the first row
    rows.write_bytes(data)
    again, lost = reopened(tmp_path, TABLES["uniform"])
    assert lost == "2 items, as rows of theirs fail their check sums" and again.epoch == 2
    assert again.size == size - 2
    check_items(again)
    again.close()
    third, lost = reopened(tmp_path, TABLES["uniform"])
    assert lost is None and third.size == size - 2
    check_items(third)


def test_rows_that_never_reached_the_disk_take_what_came_after(tmp_path: Path) -> None:
    durable = made(tmp_path, TABLES["uniform"])
    sizes: list[int] = []
    for seed in range(0, 20, 2):
        work(durable, seed)
        sizes.append(durable.limiter.inserted)
    row = int(durable.table.streams.counters.cursor[0]) - 2 * TIME * ENVS  # of the last but one
    durable.close()
    (rows,) = tmp_path.glob("rows-*")
    data = bytearray(rows.read_bytes())
    data[row * 131 * 8 : (row + 2 * TIME * ENVS) * 131 * 8] = bytes(2 * TIME * ENVS * 131 * 8)
    rows.write_bytes(data)
    again, lost = reopened(tmp_path, TABLES["uniform"])
    assert lost is not None and "records, as rows that the next one stored fail their" in lost
    assert again.limiter.inserted == sizes[-3] and again.size > 0
    check_items(again)


def test_what_was_loaded_lies_in_another_file(tmp_path: Path) -> None:
    other = made(None, TABLES["uniform"])
    durable = made(tmp_path, TABLES["uniform"])
    for seed in range(10):
        work(other, seed)
        work(durable, seed + 10)
    (before,) = tmp_path.glob("rows-*")
    durable.load(other.state())
    (after,) = tmp_path.glob("rows-*")
    assert before != after
    work(other, 30)
    work(durable, 30)
    assert state(durable) == state(other)
    durable.close()
    again, lost = reopened(tmp_path, TABLES["uniform"])
    assert lost is None and state(again) == state(other)


def test_a_disk_without_room_for_the_table_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_room = os.posix_fallocate

    def full(file: int, start: int, size: int) -> None:
        if size > tail.HEAD + tail.TAIL:
            raise OSError(28, "No space left on device")
        made_room(file, start, size)

    monkeypatch.setattr(rows_file.os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"rows-00000000 of \d+ bytes could not be made .No space"):
        made(tmp_path, replace(TABLES["uniform"], capacity=1000))
