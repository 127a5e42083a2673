"""Scalars reach the files, whatever happens to the disk, and never hold up the training."""

import errno
import math
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small import QUIET, ppo
from waiting import eventually

import dovetail
from dovetail.errors import UserError
from dovetail.run.folder import Run, read_metrics
from dovetail.run.settings import Settings
from dovetail.strategies import Local
from dovetail.telemetry import sinks as sinks_module
from dovetail.telemetry import tensorboard
from dovetail.telemetry.sinks import CsvSink, MetricsWriter, SinkPaused
from dovetail.telemetry.tensorboard import TensorBoardSink, tags
from dovetail.training.loop import Reached
from dovetail.training.reporting import check_sinks, make_recorder


class ListSink:
    """Keeps what it gets; waits for `gate` before each write and fails if `error` is set."""

    def __init__(self, error: Exception | None = None, gate: threading.Event | None = None) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self.error = error
        self.gate = gate

    def write(self, step, scalars):
        if self.gate is not None:
            self.gate.wait(10)
        if self.error is not None:
            raise self.error
        self.rows.append((step, dict(scalars)))

    def close(self):
        self.closed += 1


@contextmanager
def tiny_disk(folder: Path):
    """A real file system of 16 KiB, where the test may mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)]
    able = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("mount")
    if not able or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_csv_begins_with_the_common_columns(tmp_path):
    sink = CsvSink(tmp_path / "metrics.csv")
    sink.write(100, {"loss": 0.1, "time_s": 1.5, "updates": 2})
    sink.write(200, {"loss": math.nan, "time_s": 2.0, "updates": 4})
    sink.close()
    text = (tmp_path / "metrics.csv").read_text()
    assert text == "time_s,env_steps,updates,loss\n1.5,100,2,0.1\n2,200,4,\n"


def test_csv_columns_may_appear_later(tmp_path):
    sink = CsvSink(tmp_path / "metrics.csv")
    sink.write(1, {"a": 1 / 3})
    sink.write(2, {"b": math.inf, "a": -2.0})
    sink.write(3, {"b, c": 5})
    sink.close()
    metrics = read_metrics(tmp_path / "metrics.csv")
    assert list(metrics) == ["time_s", "env_steps", "updates", "a", "b", "b, c"]
    np.testing.assert_array_equal(metrics["a"], [1 / 3, -2, math.nan])
    np.testing.assert_array_equal(metrics["b"], [math.nan, math.inf, math.nan])
    np.testing.assert_array_equal(metrics["b, c"], [math.nan, math.nan, 5])
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert {line.count(",") for line in lines[1:]} == {5}


def test_csv_resumed_drops_what_comes_after_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("time_s,env_steps,updates,a\n1,10,1,7\n2,20,2,8\n3,30,3,9\n4,40")
    sink = CsvSink(path, append=True, after=20)
    sink.write(25, {"time_s": 2.5, "updates": 3, "b": 1})
    sink.close()
    metrics = read_metrics(path)
    np.testing.assert_array_equal(metrics["env_steps"], [10, 20, 25])
    np.testing.assert_array_equal(metrics["a"], [7, 8, math.nan])
    np.testing.assert_array_equal(metrics["b"], [math.nan, math.nan, 1])


def test_csv_append_to_nothing_and_overwrite(tmp_path):
    path = tmp_path / "metrics.csv"
    for step in (1, 2):
        sink = CsvSink(path, append=True)
        sink.write(step, {})
        sink.close()
    assert path.read_text() == "time_s,env_steps,updates\n,1,\n,2,\n"
    CsvSink(path).close()
    assert path.read_text() == "time_s,env_steps,updates\n"


def test_csv_refuses_another_kind_of_file(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="no column 'time_s'"):
        CsvSink(tmp_path / "x.csv", append=True)


def test_csv_on_a_full_disk_keeps_whole_rows_only(tmp_path):
    with tiny_disk(tmp_path / "disk") as disk:
        sink = CsvSink(disk / "metrics.csv")
        with pytest.raises(SinkPaused, match=r"metrics\.csv \(No space left on device\)"):
            for step in range(10_000):
                sink.write(step, {"time_s": step / 3})
        with pytest.raises(SinkPaused, match="lacks 1 rows"):
            sink.close()
        steps = read_metrics(disk / "metrics.csv")["env_steps"]
        np.testing.assert_array_equal(steps, np.arange(len(steps)))
        assert len(steps) > 100
        assert (disk / "metrics.csv").read_bytes().endswith(b"\n")


def test_csv_failing_for_another_reason_is_no_user_error(tmp_path):
    sink = CsvSink(tmp_path / "metrics.csv")
    sink.write(1, {})
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink.write(2, {})


def test_tags_are_the_names_users_know():
    assert tags("episode_return") == ("charts/episodic_return", "rollout/ep_rew_mean")
    assert tags("episode_return/seed2")[0] == "charts/episodic_return/seed2"
    assert tags("steps_per_s")[0] == "charts/SPS"
    assert tags("value_loss") == ("losses/value_loss",)
    assert tags("actor_loss") == ("losses/actor_loss",)
    assert tags("share_learn") == ("time/share_learn",)
    assert tags("temperature") == ("train/temperature",)


def read_events(folder: Path) -> list:
    """Every event in the folder's event files."""
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    events = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


def test_tensorboard_events(tmp_path):
    sink = TensorBoardSink(tmp_path / "events", after=99)
    sink.write(128, {"env_steps": 128, "episode_return": 21.5, "loss": math.nan, "entropy": 0.5})
    sink.close()
    version, start, event = read_events(tmp_path / "events")
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (100, 1)
    assert event.step == 128
    assert {value.tag: value.simple_value for value in event.summary.value} == {
        "charts/episodic_return": 21.5,
        "rollout/ep_rew_mean": 21.5,
        "losses/entropy": 0.5,
    }


def test_without_the_extra_nothing_is_written_and_what_needs_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: None)
    said = []
    run = Run.create(str(tmp_path / "run"), "x", {})
    make_recorder(run, {}, Settings(), Reached(), said.append).close()
    assert not (run.path / "events").exists()
    extra = "pip install 'dovetail[tensorboard]'"
    assert said == [f"Nothing is written for TensorBoard: it needs {extra}."]
    with pytest.raises(UserError) as refused:
        check_sinks(Settings(histograms=True))
    assert str(refused.value) == f"--histograms writes for TensorBoard, which needs {extra}."


def test_tensorboard_unused_writes_nothing(tmp_path):
    TensorBoardSink(tmp_path / "events").close()
    assert not (tmp_path / "events").exists()


def test_recorder_writes_everything_in_order_to_every_sink():
    sinks = [ListSink(), ListSink()]
    recorder = MetricsWriter(sinks)
    scalars = {"loss": 0.0}
    for step in range(50):
        scalars["loss"] = np.float64(step / 2)
        recorder.record(step, scalars)
    recorder.close()
    recorder.close()
    for sink in sinks:
        assert sink.rows == [(step, {"loss": step / 2}) for step in range(50)]
        assert sink.closed == 1
    assert recorder.failures == []


def test_records_are_gathered_until_they_are_due_or_many(monkeypatch):
    monkeypatch.setattr(sinks_module, "GATHERED", 60.0)
    sink = ListSink()
    recorder = MetricsWriter([sink], capacity=8)
    for step in range(3):
        recorder.record(step, {})
    time.sleep(0.2)
    assert sink.rows == []
    recorder.record(3, {})  # half of what may wait
    eventually(lambda: len(sink.rows) == 4)
    recorder.record(4, {})
    began = time.monotonic()
    recorder.close()
    assert time.monotonic() - began < 10
    assert [step for step, _ in sink.rows] == [0, 1, 2, 3, 4]
    assert recorder.dropped == 0 and recorder.failures == []


def test_gathered_records_are_written_before_the_end(monkeypatch):
    monkeypatch.setattr(sinks_module, "GATHERED", 0.05)
    sink = ListSink()
    recorder = MetricsWriter([sink])
    for step in range(2):
        recorder.record(step, {})
        eventually(lambda step=step: [row[0] for row in sink.rows] == [*range(step + 1)])
    recorder.close()


def test_recorder_never_waits_and_counts_what_it_drops():
    gate = threading.Event()
    sink = ListSink(gate=gate)
    recorder = MetricsWriter([sink], capacity=4)
    for step in range(100):
        recorder.record(step, {})
    assert recorder.dropped in (95, 96)  # the thread may hold one already
    gate.set()
    recorder.close()
    assert [step for step, _ in sink.rows][-4:] == [96, 97, 98, 99]
    assert recorder.failures == [
        f"{recorder.dropped} records of metrics were dropped, because writing them was slower "
        "than the training."
    ]


def test_recorder_gives_up_closing_in_time():
    gate = threading.Event()
    recorder = MetricsWriter([ListSink(gate=gate)])
    for step in range(3):
        recorder.record(step, {})
    recorder.close(timeout=0.05)
    assert "not all written within 0.05 s" in recorder.failures[0]
    gate.set()
    recorder.close()
    assert len(recorder.failures) == 1


def test_a_failing_sink_is_reported_once_and_the_others_go_on():
    bad, good, said = ListSink(RuntimeError("broken pipe")), ListSink(), []
    recorder = MetricsWriter([bad, good], on_failure=said.append)
    for step in range(3):
        recorder.record(step, {})
    recorder.close()
    sentence = "ListSink stopped (RuntimeError: broken pipe): the training goes on without it."
    assert said == recorder.failures == [sentence]
    assert (bad.closed, len(good.rows)) == (1, 3)


def test_what_is_no_number_is_reported_and_left_out():
    sink = ListSink()
    recorder = MetricsWriter([sink])
    recorder.record(1, {"loss": np.zeros(2)})  # pyright: ignore[reportArgumentType]
    recorder.record(2, {"loss": 1})
    recorder.close()
    assert sink.rows == [(2, {"loss": 1.0})]
    assert len(recorder.failures) == 1


def test_rows_that_found_no_room_are_written_when_there_is_some(tmp_path, monkeypatch):
    sink = CsvSink(tmp_path / "metrics.csv")
    told = []
    with monkeypatch.context() as patch:

        def full(_line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(sink, "_append", full)
        for step in (1, 2):
            with pytest.raises(SinkPaused, match="No space left"):
                sink.write(step, {})
    recorder = MetricsWriter([sink], told.append)
    recorder.record(3, {})
    recorder.close()
    assert read_metrics(tmp_path / "metrics.csv")["env_steps"].tolist() == [1, 2, 3]
    assert told == []


def test_a_full_disk_end_to_end(tmp_path):
    with tiny_disk(tmp_path / "disk") as disk:
        recorder = MetricsWriter([CsvSink(disk / "metrics.csv"), TensorBoardSink(disk / "events")])
        for step in range(100_000):
            recorder.record(step, {"loss": step / 7})
        recorder.close()
        told = "\n".join(recorder.failures)
        assert "metrics.csv (No space left on device): free some space" in told
        assert "TensorBoardSink stopped (OSError: [Errno 28] No space left on device)" in told


def test_csv_disk_full_is_recognized_by_its_number(tmp_path):
    class Full:
        def seek(self, *_):
            return 0

        def truncate(self, _size):
            raise OSError(errno.EIO, "also broken")

        def write(self, _data):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    sink = CsvSink(tmp_path / "metrics.csv")
    sink._file.close()
    sink._file = Full()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UserError, match=r"[Qq]uota"):
        sink.write(1, {})


def test_tensorboard_shows_how_arrays_are_spread(tmp_path):
    recorder = MetricsWriter([ListSink(), TensorBoardSink(tmp_path / "events")])
    recorder.record_arrays(64, {"hidden/bias": np.arange(4.0), "broken": np.array([math.nan])})
    recorder.close()
    assert recorder.failures == []
    _, event = read_events(tmp_path / "events")
    [value] = event.summary.value
    assert (event.step, value.tag) == (64, "weights/hidden/bias")
    histogram = value.histo
    assert (histogram.min, histogram.max, histogram.num) == (0.0, 3.0, 4.0)
    assert (histogram.sum, histogram.sum_squares) == (6.0, 14.0)
    assert sum(histogram.bucket) == 4 and len(histogram.bucket) == len(histogram.bucket_limit)


def test_a_run_shows_its_weights_and_its_video_on_request(tmp_path):
    settings = replace(QUIET, folder=str(tmp_path / "run"), video=True)
    quiet = dovetail.train(
        ppo(num_envs=4), "CartPole-v1", Local(), total_steps=64, settings=settings
    )
    kinds = {
        v.WhichOneof("value") for e in read_events(quiet.path / "events") for v in e.summary.value
    }
    assert kinds == {"simple_value"}
    settings = replace(settings, folder=str(tmp_path / "more"), histograms=True, log_video=True)
    run = dovetail.train(ppo(num_envs=4), "CartPole-v1", Local(), total_steps=64, settings=settings)
    values = [v for e in read_events(run.path / "events") for v in e.summary.value]
    weights = [v for v in values if v.WhichOneof("value") == "histo"]
    assert len(weights) >= 6 and all(v.tag.startswith("weights/") for v in weights)
    [film] = [v.image for v in values if v.WhichOneof("value") == "image"]
    assert film.encoded_image_string.startswith(b"GIF8")
    assert (film.height, film.width) == (400, 600)
