"""A durable service comes back with all it acknowledged, however it ended, or says what is lost."""

import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from survival import LOST, survives

from dovetail.errors import UserError
from dovetail.replay import HostTable, Prioritized, RateLimiter, ReplayService, Table, Transitions
from dovetail.replay.storage import folder, journal, tail
from dovetail.replay.storage.records import RecordFile
from dovetail.replay.storage.save import save

ROW = {"observation": np.zeros(2, np.float32), "reward": np.zeros((), np.float32)}
PROGRAM = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[2], str(Path(sys.argv[2]).parent)]
from test_replay_journal import made, work
service = made(Path(sys.argv[1]), grown=20_000)
for seed in range(100_000):
    work(service, seed)
    print(seed, flush=True)
"""


def made(folder: Path | None, capacity: int = 40, grown: int = 1 << 30) -> ReplayService:
    table = HostTable(Table(Transitions(2), capacity, Prioritized()), ROW, 2)
    return ReplayService(table, RateLimiter(2), durable=folder, grown=grown)


def work(service: ReplayService, seed: int) -> None:
    """An insert, a sample and a change of priorities, all told by the seed."""
    random = np.random.default_rng(seed)
    rows = {
        "observation": random.random((3, 2, 2), np.float32),
        "reward": random.random((3, 2), np.float32),
    }
    ends = random.random((3, 2)) < 0.2
    final = {"observation": random.random((3, 2, 2), np.float32)}
    service.insert(rows, ends, random.random((3, 2)) < 0.9, final, random.random((3, 2)))
    if service.limiter.may_sample(1):
        sample = service.sample(random.random(4))
        service.update_priorities(sample.keys, random.random(4))


def steps(service: ReplayService, seed: int) -> None:
    """An insert of steps that end no episode."""
    random = np.random.default_rng(seed)
    shapes = {"observation": (3, 2, 2), "reward": (3, 2)}
    service.insert({name: random.random(shape, np.float32) for name, shape in shapes.items()})


def state(service: ReplayService) -> dict[str, Any]:
    limits = (service.limiter.inserted, service.limiter.sampled)
    return {"limits": limits} | {name: x.tolist() for name, x in save(service.table).items()}


def test_a_service_comes_back_as_it_was(tmp_path: Path) -> None:
    plain, durable = made(None), made(tmp_path / "replay")
    for seed in range(5):
        work(plain, seed)
        work(durable, seed)
    durable.close()
    again = made(tmp_path / "replay")
    assert again.restored is not None
    assert (again.restored.records, again.restored.lost, again.epoch) == (15, None, 1)
    assert state(again) == state(plain)
    for seed in range(5, 8):
        work(plain, seed)
        work(again, seed)
    assert state(again) == state(plain)


def test_snapshots_take_the_place_of_logs(tmp_path: Path) -> None:
    plain, durable = made(None), made(tmp_path, grown=3000)
    for seed in range(40):
        work(plain, seed)
        work(durable, seed)
    durable.close()
    names = sorted(path.name.rpartition("-")[0] for path in tmp_path.iterdir())
    assert names.count("snapshot") == 1
    again = made(tmp_path)
    assert again.restored is not None and again.restored.records < 3 * 40
    limits = (again.limiter.inserted, again.limiter.sampled)
    assert limits == (plain.limiter.inserted, plain.limiter.sampled)
    draws = np.linspace(0, 0.99, 8)
    for found, wanted in zip(again.sample(draws), plain.sample(draws), strict=True):
        if isinstance(found, np.ndarray):
            np.testing.assert_array_equal(found, wanted)


def test_nothing_acknowledged_is_lost_when_it_is_killed(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), here], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "60":
                os.kill(process.pid, signal.SIGKILL)
                break
        acknowledged = max([60, *(int(x) for x in process.stdout.read().split())])
    again = made(tmp_path)
    assert again.restored is not None and again.restored.lost is None and again.epoch == 1
    counts: list[tuple[int, int]] = []
    plain = made(None)
    for seed in range(acknowledged + 3):  # it may have begun one more
        work(plain, seed)
        counts.append((plain.limiter.inserted, plain.limiter.sampled))
    found = (again.limiter.inserted, again.limiter.sampled)
    assert counts[acknowledged] <= found <= counts[acknowledged + 1]


@survives(
    "a file of a durable replay is cut",
    "any",
    "replay servers",
    LOST + ": what came after the cut, and the run says so",
)
def test_a_log_that_is_cut_restores_what_is_whole(tmp_path: Path) -> None:
    durable, plain = made(tmp_path), made(None)
    for seed in range(4):
        work(durable, seed)
    durable.close()
    (log,) = tmp_path.glob("log-*")
    size = log.stat().st_size
    os.truncate(log, size - 5)
    again = made(tmp_path)
    assert again.restored is not None
    lost = f"what came after 11 records, as {log.name} has {size - 5} of its {size} bytes"
    assert (again.restored.records, again.restored.lost, again.epoch) == (11, lost, 2)
    for seed in range(4):
        work(plain, seed)
    assert again.limiter.sampled == plain.limiter.sampled


@survives(
    "a file of a durable replay is missing",
    "any",
    "replay servers",
    LOST + ": what it held, and the run says so",
)
@pytest.mark.parametrize(
    ("gone", "lost"),
    [
        ("log", "what came after snapshot-00000001, as log-00000001 is missing"),
        ("snapshot", "the whole table, as snapshot-00000001 is missing"),
    ],
)
def test_a_file_that_is_missing_is_named(tmp_path: Path, gone: str, lost: str) -> None:
    durable = made(tmp_path)
    work(durable, 0)
    assert durable._journal is not None
    durable._journal.snapshot()
    work(durable, 1)
    durable.close()
    (tmp_path / f"{gone}-00000001").unlink()
    again = made(tmp_path)
    assert again.restored is not None and again.restored.lost == lost
    assert again.table.size == (0 if gone == "snapshot" else again.table.size)
    again.close()
    third = made(tmp_path)
    assert third.restored is not None and third.restored.lost is None
    third.close()


def test_two_services_of_one_folder(tmp_path: Path) -> None:
    first = made(tmp_path)
    with pytest.raises(UserError, match=f"in use by process {os.getpid()} on .*replay folder has"):
        made(tmp_path)
    first.close()
    made(tmp_path).close()


def test_a_damaged_log_says_what_is_lost(tmp_path: Path) -> None:
    durable = made(tmp_path)
    for seed in range(4):
        work(durable, seed)
    durable.close()
    (log,) = tmp_path.glob("log-*")
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)
    again = made(tmp_path)
    assert again.restored is not None and again.restored.lost is not None
    assert "fails its check sum" in again.restored.lost
    assert 0 < again.restored.records < 12
    assert again.epoch == 2
    found = state(again)
    work(again, 9)
    again.close()
    third = made(tmp_path)
    assert third.restored is not None and third.restored.lost is None and third.epoch == 2
    assert state(third) != found


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    made(tmp_path).close()
    with pytest.raises(UserError, match="other options .table .*capacity=40.*, not .*capacity=20"):
        made(tmp_path, capacity=20)


def test_without_a_folder_each_start_is_another_epoch() -> None:
    assert made(None).epoch != made(None).epoch


def test_files_of_another_version_are_left_alone(tmp_path: Path) -> None:
    made(tmp_path).close()
    (log,) = tmp_path.glob("log-*")
    data = b"\x10\x00\x00\x00 of an earlier version" * 9
    log.write_bytes(data)
    with pytest.raises(UserError, match="is no file of this version's replay tables"):
        made(tmp_path)
    assert log.read_bytes() == data


def test_a_later_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "FORMAT", 99)
    made(tmp_path).close()
    monkeypatch.undo()
    newer = f"newer version of Dovetail .format 99; this one reads {folder.FORMAT}"
    with pytest.raises(UserError, match=newer):
        made(tmp_path)


@pytest.mark.parametrize("behind", [False, True])
def test_a_full_disk_is_reported_and_got_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    monkeypatch.setattr(tail, "TAIL", 0)
    table = HostTable(Table(Transitions(2), 40, Prioritized()), ROW, 2)
    monkeypatch.setattr(journal, "FEW", 0)
    service = ReplayService(table, RateLimiter(2), durable=tmp_path, behind=behind)
    told: queue.Queue[UserError | None] = queue.Queue()
    work(service, 0)
    service.when_kept(told.put)
    assert told.get(timeout=30) is None

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "_write", full)
        if behind:
            steps(service, 1)
            service.when_kept(told.put)
            assert "could not be written (No space left" in str(told.get(timeout=30))
        for seed in range(3):  # and as long as there is none
            with pytest.raises(UserError, match=r"could not be written .No space left on device"):
                steps(service, seed)
    work(service, 2)
    wanted = state(service)
    service.close()
    again = made(tmp_path)
    assert again.restored is not None and again.restored.lost is None
    assert state(again) == wanted


def records_of(folder: Path) -> int:
    again = made(folder)
    assert again.restored is not None and again.restored.lost is None
    return again.restored.records


def test_a_tail_that_is_written_in_part_is_written_again(tmp_path: Path) -> None:
    durable, plain = made(tmp_path / "kept"), made(None)
    for seed in range(4):
        work(durable, seed)
        work(plain, seed)
    copies = [tmp_path / f"copy {at}" for at in range(3)]
    for copy, part in zip(copies, (0, 100, 10_000), strict=True):
        shutil.copytree(tmp_path / "kept", copy)
        kept = (copy / "tail").read_bytes()[tail.HEAD :]
        with (copy / "log-00000000").open("ab") as log:
            log.write(kept[:part])
        again = made(copy)
        assert again.restored is not None
        assert (again.restored.records, again.restored.lost) == (12, None)
        assert state(again) == state(plain)
        again.close()
        assert records_of(copy) == 12


def test_a_log_that_has_lost_its_end_is_told(tmp_path: Path) -> None:
    durable = made(tmp_path / "kept")
    for seed in range(4):
        work(durable, seed)
    durable.close()
    durable = made(tmp_path / "kept")
    work(durable, 4)
    shutil.copytree(tmp_path / "kept", tmp_path / "copy")
    log = tmp_path / "copy" / "log-00000000"
    os.truncate(log, log.stat().st_size - 5)  # as when a machine loses power
    again = made(tmp_path / "copy")
    assert again.restored is not None and again.restored.lost is not None
    assert again.restored.records == 11 and again.epoch == 2


def test_a_full_disk_leaves_what_is_in_the_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable, plain = made(tmp_path / "kept"), made(None)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    seed = 0
    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "_write", full)
        with pytest.raises(UserError, match="could not be written"):
            for seed in range(10_000):
                work(durable, seed)
        shutil.copytree(tmp_path / "kept", tmp_path / "copy")
    again = made(tmp_path / "copy")
    assert again.restored is not None and again.restored.lost is None
    for done in range(seed):
        work(plain, done)
    assert seed > 500 and again.limiter.inserted >= plain.limiter.inserted
    work(durable, seed + 1)
    wanted = state(durable)
    durable.close()
    assert state(made(tmp_path / "kept")) == wanted


def test_what_follows_a_large_record_is_written_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is acknowledged before it is written, and all is written as it was."""
    table = HostTable(Table(Transitions(2), 40, Prioritized()), ROW, 2)
    kept = tmp_path / "kept"
    monkeypatch.setattr(journal, "FEW", 1)
    service = ReplayService(table, RateLimiter(2), durable=kept, behind=True)
    go_on, add = threading.Event(), tail.Tail.add

    def later(self: tail.Tail, begin: bytes, arrays: Any) -> None:
        assert go_on.wait(30)
        add(self, begin, arrays)

    told: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(tail.Tail, "add", later)
        steps(service, 0)  # from now on they are small
        assert service._journal is not None
        patch.setattr(service._journal, "_most", 1 << 16)
        for seed in range(1, 4):
            steps(service, seed)
            service.when_kept(lambda _, seed=seed: told.append(seed))
        shutil.copytree(kept, tmp_path / "before")
        assert told == [] and records_of(tmp_path / "before") == 0
        go_on.set()
        wanted = state(service)
        service.close()
    assert told == [1, 2, 3]
    again = made(kept)
    assert again.restored is not None and again.restored.records == 4
    assert state(again) == wanted
    again.close()


def test_a_snapshot_that_cannot_be_written_is_told_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = made(tmp_path, grown=20_000)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="Until then the log"):
        patch.setattr(RecordFile, "sync", full)  # snapshots are synced, logs are not
        for seed in range(300):
            work(service, seed)
        wanted = state(service)
        service.close()
    assert len(list(tmp_path.glob("log-*"))) > 2
    again = made(tmp_path)
    assert again.restored is not None and again.restored.lost is None
    assert state(again) == wanted
    again.close()


def test_a_table_that_cannot_be_kept_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading another state fails while there is no room, and what was kept stays."""
    other, service = made(None), made(tmp_path / "kept")
    work(other, 7)
    for seed in range(3):
        work(service, seed)
    kept = state(service)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "sync", full)
        for _ in range(2):
            with pytest.raises(UserError, match="A snapshot of the replay table could not be"):
                service.load(other.state())
    shutil.copytree(tmp_path / "kept", tmp_path / "copy")
    before = made(tmp_path / "copy")
    assert state(before) == kept
    before.close()
    work(service, 8)
    wanted = state(service)
    service.close()
    assert state(made(tmp_path / "kept")) == wanted
