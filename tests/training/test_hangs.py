"""What hangs is named after the run's patience, and Ctrl-C ends it; nothing saved is lost."""

import dataclasses
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fragile import Fragile
from small import QUIET, a2c, saved
from survival import GOES_ON, RESUMES, survives

import dovetail
from dovetail.algorithms import DQN, IMPALA
from dovetail.errors import UserError
from dovetail.run.folder import Run
from dovetail.runtime import environments, execution, supervision
from dovetail.strategies import ActorLearner, Environments, Local
from dovetail.training import background_evaluation
from dovetail.training.signals import Stopped

FRAGILE = Path(__file__).resolve().parent.parent / "fragile.py"
SMALL: dict[str, Any] = {"num_envs": 4, "unroll_length": 5, "hidden_sizes": (8,)}
TINY_DQN = DQN(num_envs=4, hidden_sizes=(8,), batch_size=4, buffer_size=64, learning_starts=8)
THREADS = Environments(workers=2, processes=False)
KINDS: dict[str, tuple[Any, Any]] = {
    "local": (a2c(num_envs=4), Local()),
    "single steps": (TINY_DQN, Local()),
    "threads": (IMPALA(**SMALL), THREADS),
    "actors": (IMPALA(**SMALL), ActorLearner(actors=2, staleness=0, processes=False)),
}


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (execution, environments):
        monkeypatch.setattr(module, "JOIN_SECONDS", 0.2)
    monkeypatch.setattr(supervision, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(supervision, "GRACE", 1.2)
    monkeypatch.setattr(supervision, "STOP_SECONDS", 1.0)
    monkeypatch.setattr(background_evaluation, "CLOSE_SECONDS", 0.3)


def hanging(marker: Path, at: int = 60, seconds: float = 8.0) -> str:
    """An environment of which one hangs once, at its step `at`."""
    return f"{FRAGILE}:Fragile?how=sleep&at={at}&marker={marker}&seconds={seconds}"


def train(algorithm: Any, env: Any, strategy: Any, **settings: Any) -> Run:
    chosen = dataclasses.replace(QUIET, folder="run", **settings)
    return dovetail.train(algorithm, env, strategy, total_steps=400, settings=chosen)


@survives("an environment blocks in step", "local", "one machine", RESUMES)
@survives("an environment blocks in step", "actor-learner, in threads", "one machine", RESUMES)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "single steps", "actors"])
def test_an_environment_that_hangs_is_named_and_the_run_can_be_resumed(
    kind: str, tmp_path: Path
) -> None:
    algorithm, strategy = KINDS[kind]
    with pytest.raises(UserError) as caught:
        train(algorithm, hanging(tmp_path / "once"), strategy, patience=1.0)
    said = str(caught.value)
    assert said.startswith("A worker hangs: ") and "fragile.py" in said and "time.sleep" in said
    assert re.search(r"Update \d+ is saved: .*go on with dovetail train --resume run$", said)
    assert saved(Run.open("run"))[1]["updates"] > 0
    assert dovetail.resume("run").summary["env_steps"] >= 400


@survives("an environment blocks in step", "environments, in threads", "one machine", GOES_ON)
@pytest.mark.slow
def test_a_thread_of_environments_that_hangs_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = hanging(tmp_path / "once", 20, seconds=4.0)
    done = train(KINDS["threads"][0], env, THREADS, patience=1.0, display="plain")
    assert done.summary["env_steps"] >= 400 and done.metrics["restarts"][-1] == 1
    told = capsys.readouterr().err
    assert "The thread of environments " in told and "fragile.py" in told


@survives("Ctrl-C or SIGHUP while an environment blocks", "any", "one machine", RESUMES)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number"), [("local", signal.SIGHUP), *((kind, signal.SIGINT) for kind in KINDS)]
)
def test_the_first_signal_ends_a_run_that_hangs(kind: str, number: int, tmp_path: Path) -> None:
    algorithm, strategy = KINDS[kind]
    marker = tmp_path / "once"
    send_when(marker.exists, number)
    with pytest.raises(Stopped, match=r"everything is saved\. Go on with") as stopped:
        train(algorithm, hanging(marker), strategy, patience=1000.0)
    assert stopped.value.code == 128 + number
    assert saved(Run.open("run"))[1]["updates"] > 0


def send_when(reached: Callable[[], bool], number: int) -> None:
    """Sends this process a signal a moment after something is reached."""

    def watch() -> None:
        deadline = time.monotonic() + 60
        while not reached() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()


@survives(
    "an environment blocks in an evaluation",
    "any",
    "one machine",
    GOES_ON + ", without evaluations",
)
@pytest.mark.slow
def test_an_evaluation_that_hangs_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    def one() -> Fragile:
        evaluated = threading.current_thread().name == "dovetail-evaluation"
        return Fragile("sleep", at=9 if evaluated else 10**9, seconds=3.0)

    done = train(
        a2c(num_envs=4),
        one,
        Local(),
        patience=0.5,
        display="plain",
        episodes=100,
        evaluate_every=0.01,
    )
    assert done.summary["env_steps"] >= 400 and done.summary["final_return"] is None
    told = capsys.readouterr().err
    assert "The evaluation hangs" in told and "goes on without evaluations" in told
    assert "fragile.py" in told
