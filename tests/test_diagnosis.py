"""`doctor`, `top` and the status of live runs: what is told without searching any log."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from small import QUIET, ppo
from waiting import eventually

import dovetail
from dovetail.cli.main import main
from dovetail.errors import UserError
from dovetail.run.folder import Run
from dovetail.strategies import Local
from dovetail.telemetry import status as status_module
from dovetail.telemetry.status import Status

COMMAND = [sys.executable, "-c", "from dovetail.cli.main import main; raise SystemExit(main())"]


def test_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert "JAX has 4 device(s): cpu" in told and "/dev/shm" in told and "cores" in told
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {finding["level"] for finding in found} <= {"good", "note", "bad"}


def test_a_run_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = replace(QUIET, folder=str(tmp_path / "run"))
    run = dovetail.train(
        ppo(num_envs=4), "CartPole-v1", Local(), total_steps=200, settings=settings
    )
    [finding] = dovetail.doctor(run)
    assert finding.text == "It has ended: done"
    assert not (run.path / "stacks.txt").exists()
    with pytest.raises(UserError, match="is not running"):
        dovetail.stacks(run)
    assert main(["top", str(run.path)]) == 0
    assert "bottleneck" in capsys.readouterr().out


@contextmanager
def live(folder: Path, *more: str) -> Generator[subprocess.Popen[str]]:
    words = ["train", "ppo", "--env", "CartPole-v1", "--total-steps", "1_000_000_000", "--no-video"]
    words += ["--hidden-sizes", "8", "--display", "none", "--run", str(folder), "--episodes", "2"]
    with subprocess.Popen([*COMMAND, *words, *more], stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_run_that_is_alive_and_then_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with live(folder) as process:
        eventually(lambda: (folder / "telemetry.json").exists())
        eventually(lambda: json.loads((folder / "status.json").read_text())["workers"])
        told = [finding.text for finding in dovetail.doctor(folder)]
        assert told[0] == f"Process {process.pid} on {os.uname().nodename} is alive"
        assert any(text.startswith("main ") for text in told)
        assert "loop.py" in dovetail.stacks(folder)
        assert "unroll.step" in str(dovetail.analyze(folder))
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(UserError, match=f"Process {process.pid} of .* did not answer in 0.3 s"):
            dovetail.stacks(folder, seconds=0.3)
        assert not (folder / "stacks.asked").exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
    first, *others = dovetail.doctor(folder)
    assert any(text.startswith("main was ") for text in (finding.text for finding in others))
    assert not any(finding.text.startswith("main is ") for finding in others)
    assert first.level == "bad"
    assert f"process {process.pid} is gone" in first.text and "--resume" in first.text


def test_where_the_processes_of_environments_stand(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    more = ["--strategy", "environments", "--workers", "2", "--num-envs", "4", "--processes"]
    with live(folder, *more):
        eventually(lambda: (folder / "telemetry.json").exists())
        eventually(lambda: dovetail.stacks(folder).count("which steps environments") == 2)
        told = dovetail.stacks(folder)
        assert told.count("envs/child.py") >= 2 and "loop.py" in told
        assert dovetail.doctor(folder)[0].level == "good"  # the question has ended nobody


def test_an_error_that_ended_a_run_is_told_with_its_traceback(tmp_path: Path) -> None:
    settings = replace(QUIET, folder=str(tmp_path / "run"))

    class Breaks(CartPoleEnv):
        def step(self, action: Any) -> Any:
            raise RuntimeError("the pole broke")

    with pytest.raises(UserError):
        dovetail.train(ppo(num_envs=4), Breaks, Local(), total_steps=200, settings=settings)
    first, second, third = dovetail.doctor(tmp_path / "run")
    assert first.level == "bad" and "the pole broke" in first.text
    assert "in step" in second.text and 'RuntimeError("the pole broke")' in second.text
    assert "the run is written there" in third.text


def test_a_worker_that_hangs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "EVERY", 0.05)
    run = Run.create(str(tmp_path / "run"), "x", {})
    workers = [
        {"name": "learner", "doing": "", "waits_for": "unrolls", "quiet_s": 90.0},
        {"name": "actor-0", "doing": "running unroll", "waits_for": "", "quiet_s": 91.0},
    ]
    progress = {"env_steps": 640, "last_report": time.time() - 92}
    status = Status(run, lambda: workers, lambda: progress)
    status.message("actor-0 failed; its environments are set up again")
    eventually(lambda: "failed" in _text(run), 5.0)
    found = {finding.text: finding.level for finding in dovetail.doctor(run)}
    status.close("stopped")
    assert found["actor-0 is running unroll (91 s)"] == "bad"
    assert found["learner waits for unrolls (90 s)"] == "note"
    assert found["640 steps; the last report came 92 s ago"] == "bad"
    assert any("set up again" in text for text in found)
    assert dovetail.doctor(run)[0].text == "It has ended: stopped"


def test_asking_where_threads_stand_disturbs_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_module, "LOOKS", 0.001)
    run = Run.create(str(tmp_path / "run"), "x", {})
    over = threading.Event()

    def descend(depth: int) -> int:
        return descend(depth - 1) + 1 if depth else 0

    def busy() -> None:
        while not over.is_set():
            descend(20)

    workers = [threading.Thread(target=busy, name=f"busy-{i}") for i in range(2)]
    status = Status(run, list, dict)
    eventually(lambda: (run.path / "status.json").exists())
    for worker in workers:
        worker.start()
    told = [dovetail.stacks(run) for _ in range(10)]
    over.set()
    for worker in workers:
        worker.join()
    status.close()
    assert all(text.count("in busy\n") == 2 and "thread busy-1" in text for text in told)
    assert not (run.path / "stacks.txt").exists()


def _text(run: Run) -> str:
    file = run.path / "status.json"
    return file.read_text() if file.exists() else ""


def test_a_run_that_never_began_is_told(tmp_path: Path) -> None:
    run = Run.create(str(tmp_path / "run"), "x", {})
    with pytest.raises(UserError, match=r"has no status\.json"):
        dovetail.doctor(run)
    assert main(["doctor", "--stacks"]) == 2
