"""W&B and MLflow, the real packages and offline: the same run after a resume, and nothing else."""

import json
import os
import socket
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small import QUIET, ppo

import dovetail
from dovetail.cli.main import main
from dovetail.errors import UserError
from dovetail.run.folder import Run
from dovetail.strategies import Local
from dovetail.telemetry import remote
from dovetail.telemetry.remote import ThreadedSink, check_services, flat, kept_id
from dovetail.telemetry.sinks import MetricsWriter

OLD = "ignore:The ``noload`` loader strategy is deprecated"
pytestmark = pytest.mark.filterwarnings(OLD)  # MLflow's use of SQLAlchemy


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No network but this machine's own, and a home of its own."""
    home = tmp_path / "home"
    home.mkdir()
    for name in [n for n in os.environ if n.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_MODE", "offline")
    connect = socket.socket.connect

    def near(self: socket.socket, address: Any) -> None:
        near_by = self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost")
        assert near_by, f"it calls {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", near)
    return home


def outside(home: Path) -> list[Path]:
    """What a service left at home."""
    return [path for path in home.rglob("*") if "wandb" in path.name or "mlflow" in path.name]


def trained(folder: Path, services: tuple[str, ...], **more: Any) -> Run:
    settings = replace(QUIET, folder=str(folder), log=services, **more)
    return dovetail.train(
        ppo(unroll_length=32, num_envs=4),
        "CartPole-v1",
        Local(),
        total_steps=512,
        settings=settings,
    )


def history(run: Run) -> dict[str, list[tuple[int, float]]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run.path / 'mlflow' / 'mlflow.db'}")
    id_ = (run.path / "mlflow" / "run-id").read_text()
    names = client.get_run(id_).data.metrics
    return {n: [(m.step, m.value) for m in client.get_metric_history(id_, n)] for n in names}


def test_a_run_reaches_mlflow_and_goes_on_there(tmp_path: Path, alone: Path) -> None:
    from mlflow.tracking import MlflowClient

    run = trained(tmp_path / "run", ("mlflow",), project="poles")
    before = history(run)
    assert before["env_steps"][-1] == (512, 512.0)
    dovetail.resume(run, total_steps=1024)
    after = history(run)
    assert after["env_steps"][-1] == (1024, 1024.0)
    assert set(after["loss"]) > set(before["loss"])
    client = MlflowClient(tracking_uri=f"sqlite:///{run.path / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("poles")
    assert experiment is not None
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == "run"
    assert found.data.params["algorithm"] == "ppo"
    assert found.data.params["options.unroll_length"] == "32"
    assert outside(alone) == []


def offline_records(run: Run) -> list[Any]:
    """What W&B kept, start by start: LevelDB's log format, after a header of its own."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    found: list[Any] = []
    for file in sorted(run.path.glob("wandb/offline-run-*/*.wandb")):
        data, at, piece = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            left = 32768 - at % 32768
            if left < 7:
                at += left
                continue
            length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            piece += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or its last part
                found.append(Record.FromString(piece))
                piece = b""
    return found


def test_a_run_is_kept_for_wandb_and_goes_on_there(tmp_path: Path, alone: Path) -> None:
    run = trained(tmp_path / "run", ("wandb",), project="poles")
    dovetail.resume(run, total_steps=1024)
    records = offline_records(run)
    starts = [record.run for record in records if record.HasField("run")]
    known = (run.path / "wandb" / "run-id").read_text()
    assert {(start.run_id, start.project) for start in starts} == {(known, "poles")}
    assert len(list(run.path.glob("wandb/offline-run-*"))) == 2
    config = {item.key: json.loads(item.value_json) for item in starts[0].config.update}
    assert config["algorithm"] == "ppo" and config["options"]["unroll_length"] == 32
    steps = [
        json.loads(item.value_json)
        for record in records
        if record.HasField("history")
        for item in record.history.item
        if "env_steps" in (item.key, *item.nested_key)
    ]
    assert steps == sorted(steps) and steps[-1] == 1024
    assert outside(alone) == []


def test_without_a_key_wandb_is_offline_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dovetail.telemetry.wandb import WandbSink

    monkeypatch.delenv("WANDB_MODE")
    told: list[str] = []
    sink = WandbSink(tmp_path / "run", {}, "poles", told.append)
    sink.write(1, {"loss": 0.5})
    sink.close()
    [sentence] = told
    assert "knows no key" in sentence and f"wandb sync {tmp_path / 'run'}" in sentence


def test_a_service_that_fails_is_told_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = trained(tmp_path / "run", ("mlflow",), display="plain")
    assert run.summary["env_steps"] == 512 and len(run.metrics["loss"]) > 0
    assert capsys.readouterr().err.count("MlflowSink stopped") == 1


class Breaks:
    def __init__(self) -> None:
        self.rows = 0

    def write(self, step: int, scalars: Any) -> None:
        self.rows += 1
        if self.rows == 3:
            raise ConnectionError("the network is gone")

    def close(self) -> None:
        """Nothing to close."""


def test_a_sink_that_breaks_in_the_middle_leaves_the_others_alone() -> None:
    told: list[str] = []
    breaks = Breaks()
    recorder = MetricsWriter([ThreadedSink(breaks, told.append)], told.append)
    for step in range(10):
        recorder.record(step, {"loss": 1.0})
    recorder.close()
    assert breaks.rows == 3
    assert told == [
        "Breaks stopped (ConnectionError: the network is gone): the training goes on without it."
    ]


@pytest.mark.parametrize("service", ["wandb", "mlflow"])
def test_a_missing_package_names_its_extra(
    service: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote.importlib.util, "find_spec", lambda name: None)
    words = ["train", "ppo", "--env", "CartPole-v1", "--log", service]
    assert main(words) == 2
    assert f"install the extra, pip install 'dovetail[{service}]'" in capsys.readouterr().err


def test_an_unknown_service_is_refused() -> None:
    with pytest.raises(UserError, match=r"--log has no 'wandn'.*wandb"):
        check_services(("wandn",))


def test_options_become_one_level_and_ids_are_kept(tmp_path: Path) -> None:
    assert flat({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a.b": 1, "a.c.d": 2, "e": 3}
    first = kept_id(tmp_path / "x" / "id")
    assert kept_id(tmp_path / "x" / "id") == first
