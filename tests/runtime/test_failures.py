"""What fails is named; environments and actors come back, a learner ends the run; nothing is left.

Everything here fails for real: processes are killed at random moments, environments hang.
"""

import dataclasses
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from small import QUIET, Started, a2c
from survival import GOES_ON, RESUMES, survives

import dovetail
from dovetail.algorithms import A3C, IMPALA
from dovetail.errors import UserError
from dovetail.run.folder import Run
from dovetail.runtime import execution, supervision
from dovetail.runtime.programs import FragmentProgram
from dovetail.strategies import (
    ActorLearner,
    CentralInference,
    Environments,
    ParameterServer,
    SplitDevices,
)
from dovetail.strategies.interface import Strategy

FRAGILE = Path(__file__).resolve().parent.parent / "fragile.py"
SHORT: dict[str, Any] = {"unroll_length": 5, "hidden_sizes": (8,)}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE", 0.01)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Generator[None]:
    """No process, thread or shared memory outlives a run."""
    before = processes(), threads(), segments()
    yield
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (processes() - before[0] or threads() - before[1]):
        time.sleep(0.05)
    assert processes() - before[0] == set()
    assert threads() - before[1] == set()
    assert segments() - before[2] == set()


def processes() -> set[Any]:
    return set(multiprocessing.active_children())


def threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("dovetail-")}


def segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("psm_")}


def fragile(how: str, at: int = 12, marker: Path | None = None) -> str:
    once = f"&marker={marker}" if marker is not None else ""
    return f"{FRAGILE}:Fragile?how={how}&at={at}{once}"


def run(
    algorithm: Any, env: str, strategy: Strategy, folder: Path, steps: int = 2000, **settings: Any
) -> Run:
    chosen = dataclasses.replace(QUIET, folder=str(folder), **settings)
    return dovetail.train(algorithm, env, strategy, total_steps=steps, settings=chosen)


IMPALA_STRATEGIES: dict[str, Strategy] = {
    "actor-learner in threads": ActorLearner(processes=False),
    "actor-learner in processes": ActorLearner(processes=True),
    "synchronous": ActorLearner(staleness=0, processes=True),
    "central-inference": CentralInference(processes=True),
    "central-inference in threads": CentralInference(processes=False),
    "environments": Environments(processes=True),
    "split-devices": SplitDevices(),
}


@survives(
    "an environment raises", "with environments on workers of their own", "one machine", GOES_ON
)
@pytest.mark.parametrize("strategy", IMPALA_STRATEGIES)
def test_an_environment_that_raises_once_is_set_up_again(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = fragile("raise", marker=tmp_path / "once")
    done = run(IMPALA(**SHORT), env, IMPALA_STRATEGIES[strategy], tmp_path / "run", display="plain")
    assert done.metrics["restarts"][-1] == 1
    assert done.summary["env_steps"] >= 2000
    told = capsys.readouterr().err
    assert "failed; its environments are set up again" in told and "ValueError" in told
    assert "the cart fell off" in told


def test_a_worker_of_a_parameter_server_is_set_up_again(tmp_path: Path) -> None:
    env = fragile("raise", marker=tmp_path / "once")
    done = run(A3C(**SHORT), env, ParameterServer(), tmp_path / "run")
    assert done.metrics["restarts"][-1] == 1


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_one_that_always_fails_ends_the_run_with_its_name(how: str, tmp_path: Path) -> None:
    strategy = ActorLearner(processes=how == "exit")
    with pytest.raises(UserError) as caught:
        run(IMPALA(**SHORT), fragile(how), strategy, tmp_path / "run")
    said = str(caught.value)
    assert said.startswith("Worker actor-")
    assert ("ValueError" in said) == (how == "raise")
    assert "saved" in said
    assert caught.value.__cause__ is not None


@survives(
    "the process of an actor or of environments is killed",
    "any with processes",
    "one machine",
    GOES_ON,
)
@pytest.mark.parametrize("strategy", [p for p in IMPALA_STRATEGIES if "thread" not in p][:4])
def test_killed_processes_come_back(strategy: str, tmp_path: Path) -> None:
    chance, killed = random.Random(strategy), []
    stopping = threading.Event()

    def kill() -> None:
        while len(killed) < 3 and not stopping.wait(chance.uniform(0.3, 0.9)):
            children = [p for p in multiprocessing.active_children() if p.pid is not None]
            if children:
                victim = chance.choice(children)
                os.kill(victim.pid or 0, signal.SIGKILL)
                killed.append(victim.pid)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        env = f"{FRAGILE}:Fragile?at=-1"
        done = run(
            IMPALA(**SHORT), env, IMPALA_STRATEGIES[strategy], tmp_path / "run", steps=25_000
        )
    finally:
        stopping.set()
        killer.join()
    assert killed
    assert done.summary["env_steps"] >= 25_000
    assert 1 <= done.metrics["restarts"][-1] <= len(killed)


@survives(
    "an environment blocks in step",
    "actor-learner or central-inference, in processes",
    "one machine",
    GOES_ON,
)
@pytest.mark.parametrize("strategy", ["synchronous", "central-inference"])
def test_a_process_that_hangs_is_named_with_where_it_stands(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = fragile("sleep", marker=tmp_path / "once")
    chosen = IMPALA_STRATEGIES[strategy]
    done = run(IMPALA(**SHORT), env, chosen, tmp_path / "run", patience=3.0, display="plain")
    assert done.metrics["restarts"][-1] >= 1
    told = capsys.readouterr().err
    assert "fragile.py" in told and "in step" in told


def test_a_thread_that_hangs_is_named_with_where_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "JOIN_SECONDS", 0.2)
    env = fragile("sleep", marker=tmp_path / "once") + "&seconds=9"
    with pytest.raises(UserError) as caught:
        run(
            IMPALA(**SHORT),
            env,
            ActorLearner(staleness=0, processes=False),
            tmp_path / "run",
            patience=3.0,
        )
    said = str(caught.value)
    assert "A worker hangs: actor-" in said
    assert "fragile.py" in said and "time.sleep(self._seconds)" in said


@survives("the learner fails", "any", "one machine", RESUMES)
def test_a_learner_that_fails_ends_the_run_with_the_checkpoint_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, calls = FragmentProgram.run, []

    def fails_later(self: FragmentProgram, values: Any) -> None:
        calls.append(self.name)
        if len(calls) > 20:
            raise RuntimeError("out of memory")
        ran(self, values)

    monkeypatch.setattr(FragmentProgram, "run", fails_later)
    with pytest.raises(UserError) as caught:
        run(
            a2c(),
            "CartPole-v1",
            ActorLearner(staleness=0, processes=False),
            tmp_path / "run",
            steps=100_000,
        )
    said = str(caught.value)
    assert said.startswith("Worker learner failed: ") and "RuntimeError: out of memory" in said
    assert f"go on with dovetail train --resume {tmp_path / 'run'}" in said


def test_a_pause_between_two_orders_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "GRACE", 0.0)
    with Started(
        a2c(num_envs=4), "CartPole-v1", ActorLearner(actors=2, processes=False)
    ) as running:
        running.advance(2)
        run: Any = running.runtime._run
        run._patience = 0.3
        time.sleep(1.0)
        assert running.advance(2).iterations == 2
