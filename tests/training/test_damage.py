"""A damaged run goes on from what is intact, and says what it did without."""

import dataclasses
import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from small import LENGTH, QUIET, a2c, saved, stop_after
from survival import GOES_ON, LOST, RESUMES, survives

import dovetail
from dovetail.cli.main import main
from dovetail.errors import UserError
from dovetail.locking import FolderLock
from dovetail.run import checkpoint
from dovetail.run.folder import Run
from dovetail.strategies.fused import Fused

CHAIN = "dovetail:Chain-v0"
EACH = 4 * LENGTH
"""Steps of an update."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 updates with three checkpoints, not to be changed."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    settings = dataclasses.replace(QUIET, folder=str(folder))
    run = dovetail.train(a2c(num_envs=4), CHAIN, Fused(), total_steps=4 * EACH, settings=settings)
    for updates in (6, 8):
        dovetail.resume(run, total_steps=updates * EACH)
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def resume(folder: Path, capsys: pytest.CaptureFixture[str], *more: str, updates: int = 9) -> str:
    """Resumes by the real command; what it says."""
    capsys.readouterr()
    words = ["train", "--resume", str(folder), "--total-steps", str(updates * EACH), *more]
    assert main(words) == 0, capsys.readouterr()
    assert saved(Run.open(folder))[1]["updates"] == updates
    return capsys.readouterr().err


@pytest.fixture
def shown(copied: Path) -> Path:
    """A copy whose resumption speaks."""
    config = (copied / "config.json").read_text()
    (copied / "config.json").write_text(config.replace('"display": "none"', '"display": "plain"'))
    return copied


@survives("the newest checkpoint is damaged", "any", "any", RESUMES + ", from the one before")
@pytest.mark.parametrize("damage", ["cut", "gone", "meta", "nested"])
def test_a_broken_checkpoint_gives_way_to_the_one_before(
    shown: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    newest = shown / "checkpoints" / "8"
    if damage == "meta":
        (newest / "meta.json").write_text("{}")
    elif damage == "nested":
        (newest / "meta.json").write_text("[" * 100_000)
    else:
        largest = max((newest / "arrays").rglob("*"), key=lambda path: path.stat().st_size)
        os.truncate(largest, 3) if damage == "cut" else largest.unlink()
    told = resume(shown, capsys)
    assert "Checkpoint 8 in " in told
    assert "is damaged: " in told and "goes on from checkpoint 6 instead" in told


@survives("every checkpoint is damaged", "any", "any", LOST + ": the run")
def test_only_broken_checkpoints_are_an_error(copied: Path) -> None:
    for meta in (copied / "checkpoints").glob("*/meta.json"):
        meta.write_text("{}")
    with pytest.raises(UserError, match="Checkpoint 4 in .* is damaged"):
        dovetail.resume(copied, total_steps=9 * EACH)


def test_an_earlier_checkpoint_can_be_chosen(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume(copied, capsys, "--checkpoint", "4", updates=5)
    assert {path.name for path in (copied / "checkpoints").iterdir()} == {"4", "5"}
    assert main(["train", "--resume", str(copied), "--checkpoint", "7"]) == 2
    assert "No checkpoint 7 in " in (told := capsys.readouterr().err)
    assert told.rstrip().endswith("choose one of: 4, 5.")
    assert main(["train", "a2c", "--env", CHAIN, "--checkpoint", "7"]) == 2
    assert "add --resume RUN" in capsys.readouterr().err


def test_a_link_out_of_a_checkpoint_is_not_followed(copied: Path, tmp_path: Path) -> None:
    newest = copied / "checkpoints" / "8"
    largest = max((newest / "arrays").rglob("*"), key=lambda path: path.stat().st_size)
    largest.rename(tmp_path / "elsewhere")
    largest.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is damaged"):
        dovetail.resume(copied, total_steps=9 * EACH, checkpoint=8)


@survives("metrics.csv, summary.json or status.json is damaged", "any", "any", RESUMES)
@pytest.mark.parametrize("file", ["metrics.csv", "summary.json", "status.json"])
@pytest.mark.parametrize("content", [b"", b"\xff\x00,\n1", b"time_s,env_steps,updates\nx,y,z\n"])
def test_what_only_shows_a_run_never_keeps_it_from_going_on(
    shown: Path, capsys: pytest.CaptureFixture[str], file: str, content: bytes
) -> None:
    (shown / file).write_bytes(content)
    told = resume(shown, capsys)
    if file == "metrics.csv" and content:
        assert "It is kept as metrics-damaged.csv" in told
        assert (shown / "metrics-damaged.csv").read_bytes() == content
    assert Run.open(shown).metrics["updates"][-1] == 9
    assert Run.open(shown).summary["updates"] == 9


@survives("killed before the first checkpoint", "any", "any", RESUMES + ", from the beginning")
def test_a_run_killed_before_its_first_checkpoint_begins_anew(
    shown: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(shown / "checkpoints")
    (shown / "summary.json").unlink()
    (shown / ".config.json.12-34").write_text("{")
    assert "has no checkpoint yet: it begins anew" in resume(shown, capsys, updates=3)
    assert not list(shown.glob(".*")) and len(Run.open(shown).metrics["updates"]) <= 3


def test_a_second_writer_of_a_run_is_refused(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FolderLock(copied, "run"):
        assert main(["train", "--resume", str(copied), "--total-steps", "1000"]) == 2
    assert f"is in use by process {os.getpid()} on " in capsys.readouterr().err


def test_a_run_has_a_writer_while_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        dovetail.train(
            *(a2c(num_envs=4), CHAIN, Fused()),
            total_steps=10**6,
            settings=dataclasses.replace(QUIET, folder="run", metrics_port=None),
        )
    assert not Path("run", "writer.lock").exists()


@survives("the disk is full", "any", "any", GOES_ON + ", without checkpoints until there is room")
def test_a_full_disk_pauses_checkpoints(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    calls, written = list[int](), checkpoint._write_arrays

    def write(folder: Path, request: Any) -> None:
        calls.append(request.step)
        if len(calls) <= 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(folder, request)

    monkeypatch.setattr(checkpoint, "_write_arrays", write)
    settings = dataclasses.replace(
        QUIET, folder="run", checkpoint_every="1600steps", display="plain"
    )
    done = dovetail.train(
        a2c(num_envs=4), CHAIN, Fused(), total_steps=4000 * EACH, settings=settings
    )
    told = capsys.readouterr().err
    assert "could not be written" in told and "No space left" in told
    assert told.count("Training goes on, and tries again") == 1
    assert "Checkpoints are written again." in told
    assert saved(done)[1]["updates"] == 4000 and len(calls) > 3


@pytest.mark.slow
def test_the_files_of_a_killed_server_are_removed(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    serve = (
        "import numpy as np, time\nfrom dovetail.replay import ReplayServer, Table\n"
        "server = ReplayServer(Table(capacity=8), dict(x=np.zeros(2)), 1)\n"
        "print(server.address.pid, flush=True)\n"
    )
    words = [sys.executable, "-c", serve + "time.sleep(60)"]
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    os.kill(pid, 9)
    process.kill()
    process.communicate()
    assert len(list(tmp_path.glob("dovetail-replay-*"))) == 1
    subprocess.run([sys.executable, "-c", serve + "server.close()"], env=environment)
    deadline = time.monotonic() + 10
    while list(tmp_path.glob("dovetail-replay-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.glob("dovetail-replay-*")) == []
