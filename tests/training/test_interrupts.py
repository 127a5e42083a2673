"""Ctrl-C and SIGTERM at any moment of the real command, once and twice."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small import LENGTH, numbers, saved
from survival import RESUMES, survives

import dovetail
from dovetail.cli.interrupts import insisting
from dovetail.run.folder import Run

pytestmark = pytest.mark.slow

TINY = (
    f"--unroll-length {LENGTH} --hidden-sizes 8 --total-steps 100_000_000 --episodes 2 --no-video"
    " --checkpoint-every 0.05 --display plain --run run"
)
LINES = {
    "fused": f"train a2c --env dovetail:Chain-v0 --strategy fused --num-envs 4 {TINY}",
    "processes": f"train a2c --env CartPole-v1?vectorization=async --num-envs 2 {TINY}",
    "actors": "train impala --env CartPole-v1 --strategy actor-learner --processes --num-envs 4 "
    + TINY,
    "inference": "train a2c --env CartPole-v1 --strategy central-inference --processes "
    f"--workers 2 --num-envs 4 {TINY}",
}
SIDE = (
    f"train {Path(__file__).parents[2] / 'examples' / 'critic_apart.py'}:CriticApart "
    "--env CartPole-v1 --strategy actor-learner --sides critic@process --num-envs 4 --actors 1 "
    "--hidden 8 " + TINY.replace("--hidden-sizes 8 ", "")
)
HANGING = '''
import time
from dataclasses import dataclass
from pathlib import Path
import jax
import numpy as np
from dovetail.algorithms import REINFORCE

@dataclass(frozen=True)
class Judged(REINFORCE):
    """Asks a judge in Python about every batch; the tenth time it does not answer."""

    def iteration(self, rl, state):
        state, metrics = super().iteration(rl, state)
        shape = jax.ShapeDtypeStruct((), np.float32)
        loss = next(iter(metrics.values()))
        score = rl.call("judge", self.score, loss, host=True, result=shape)
        return state, {**metrics, "score": score}

    def score(self, loss):
        calls = Path("calls")
        count = int(calls.read_text()) + 1 if calls.exists() else 1
        calls.write_text(str(count))
        if count == 10:
            Path("hangs").touch()
            time.sleep(1000)
        return np.float32(loss)
'''
RUN = Path("run")


def created() -> bool:
    return (RUN / "config.json").exists()


def training() -> bool:
    return (RUN / "metrics.csv").exists() and (RUN / "metrics.csv").read_text().count("\n") > 2


def checkpointing() -> bool:
    return any((RUN / "checkpoints").glob(".tmp-*")) or any((RUN / "checkpoints").glob("[0-9]*"))


def trained() -> bool:
    return (RUN / "checkpoints" / "8").exists()


class Command:
    """The command in a process group of its own, as a terminal has it."""

    def __init__(self, line: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dovetail", *line.split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(dovetail.__file__).parents[1])},
            start_new_session=True,
        )

    def when(self, reached: Callable[[], bool]) -> None:
        """Waits until the run has got that far."""
        until = time.monotonic() + 100
        while not reached():
            if self.process.poll() is not None or time.monotonic() > until:
                self.process.kill()
                raise AssertionError(self.process.communicate())
            time.sleep(0.005)

    def send(self, number: int) -> None:
        """A signal to the whole group: what a terminal does at Ctrl-C."""
        os.killpg(self.process.pid, number)

    def end(self) -> tuple[int, str]:
        """(exit code, standard error); nobody of the group may be left."""
        try:
            _, err = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            raise AssertionError(self.process.communicate()) from None
        left = [pid for pid in group(self.process.pid) if pid != self.process.pid]
        assert not left, f"{left} outlive the command"
        return self.process.returncode, err


def group(leader: int) -> list[int]:
    """The processes of a group that are alive, but for those about to be gone."""
    until = time.monotonic() + 5
    while True:
        alive: list[int] = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = entry.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == leader and fields[0] not in "ZX":
                alive.append(int(entry.parent.name))
        if not alive or time.monotonic() > until:
            return alive
        time.sleep(0.05)


def assert_whole() -> None:
    """Every checkpoint that is there can be restored, and whatever else is there is hidden."""
    run = Run.open(RUN)
    for entry in (RUN / "checkpoints").glob("*"):
        if not entry.name.startswith("."):
            tree, meta = saved(run, int(entry.name))
            assert meta["updates"] == int(entry.name) == int(tree["state"].updates)
            assert np.isfinite(numbers(tree["state"])).all()


def last_line(err: str) -> str:
    assert "Traceback" not in err, err
    return err.splitlines()[-1]


def semaphores(process: int) -> list[str]:
    """The named semaphores that a process uses, as the kernel shows them."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return [line[line.index("/dev/shm/sem.") :] for line in lines if "/dev/shm/sem." in line]


@pytest.mark.parametrize("kind", ["actors", "inference"])
def test_no_semaphore_can_be_left_even_if_all_are_killed(kind: str) -> None:
    """While it trains, their names are gone already."""
    command = Command(LINES[kind])
    command.when(training)
    found = semaphores(command.process.pid)
    command.send(signal.SIGKILL)
    assert command.end()[0] == -signal.SIGKILL
    assert len(found) >= 2 and all(name.endswith(" (deleted)") for name in found), found


@survives("Ctrl-C", "any", "one machine", RESUMES)
@pytest.mark.parametrize("kind", LINES)
@pytest.mark.parametrize("reached", [created, training, checkpointing])
def test_the_first_one_saves(kind: str, reached: Callable[[], bool]) -> None:
    command = Command(LINES[kind])
    command.when(reached)
    command.send(signal.SIGINT)
    code, err = command.end()
    assert code == 130, err
    if reached is created and last_line(err).endswith("before training began."):
        return  # nothing to save
    told = re.fullmatch(
        r"dovetail: Stopped by Ctrl-C after ([\d,]+) steps; everything is saved\. "
        r"Go on with: dovetail train --resume run",
        last_line(err),
    )
    assert told, err
    assert_whole()
    run = Run.open(RUN)
    assert run.summary["env_steps"] == int(told[1].replace(",", "")) == saved(run)[1]["env_steps"]
    assert (RUN / "policy").is_dir()


@survives("SIGTERM to the process group", "any, and sides in processes", "one machine", RESUMES)
@pytest.mark.parametrize("kind", [*LINES, "side"])
def test_sigterm_saves_too(kind: str) -> None:
    """To the whole group, as schedulers send it; nobody is set up again on the way out."""
    command = Command(LINES.get(kind, SIDE))
    command.when(training)
    command.send(signal.SIGTERM)
    code, err = command.end()
    assert code == 128 + 15, err
    told = re.fullmatch(
        r"dovetail: Stopped by SIGTERM after ([\d,]+) steps; everything is saved\. Go on with: .*",
        last_line(err),
    )
    assert told and "set up again" not in err, err
    if kind != "side":  # whose state has no count of updates
        assert_whole()
    checkpoints = sorted(map(int, os.listdir(RUN / "checkpoints")))
    assert Run.open(RUN).summary["updates"] == checkpoints[-1] > 0


@survives("SIGTERM while a side in Python blocks", "any", "one machine", RESUMES)
def test_a_python_side_that_hangs_does_not_keep_a_run_from_ending() -> None:
    Path("judged.py").write_text(HANGING)
    command = Command(
        "train judged.py:Judged --env CartPole-v1 --strategy local --sides judge@process "
        f"--num-envs 2 --patience 3 {TINY.replace('--hidden-sizes 8', '')}"
    )
    command.when(Path("hangs").exists)
    command.send(signal.SIGTERM)
    code, err = command.end()
    assert code == 128 + 15, err
    assert re.match(r"dovetail: Stopped by SIGTERM after .*everything is saved", last_line(err)), (
        err
    )
    assert "set up again" not in err


@pytest.mark.parametrize("kind", LINES)
@pytest.mark.parametrize("pause", [0.0, 0.02])
def test_the_second_one_ends_at_once(kind: str, pause: float) -> None:
    command = Command(LINES[kind])
    command.when(checkpointing)
    command.send(signal.SIGINT)
    time.sleep(pause)
    command.send(signal.SIGINT)
    code, err = command.end()
    assert code in (130, -signal.SIGINT), err  # the latter when all was done already
    assert re.match(r"dovetail: (Interrupted\.|Stopped by Ctrl-C)", last_line(err)), err
    assert_whole()


@pytest.mark.parametrize("pause", [0.1, 0.5, 1.0])
def test_while_starting(pause: float) -> None:
    command = Command(LINES["processes"])
    time.sleep(pause)
    command.send(signal.SIGINT)
    code, err = command.end()
    if code != -signal.SIGINT:  # Dovetail itself was not up yet
        assert code == 130, err
        assert err.splitlines()[-1].startswith("dovetail: "), err
    if RUN.exists():
        assert_whole()


def test_what_a_callback_forgets_comes_again() -> None:
    class Callback:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), insisting() as interrupts:
        Callback()
        time.sleep(30)
    assert interrupts.seen
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before


def test_after_the_end_of_the_last_block_ctrl_c_just_ends_the_process() -> None:
    with insisting(last=True):
        assert signal.getsignal(signal.SIGINT) is not signal.SIG_DFL
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is signal.SIG_DFL


def test_while_finishing() -> None:
    line = LINES["processes"].replace("100_000_000", "64").replace("--episodes 2", "--episodes 100")
    command = Command(line)
    command.when(trained)
    command.send(signal.SIGINT)
    code, err = command.end()
    assert code in (0, 130), err
    assert_whole()
    assert Run.open(RUN).summary["env_steps"] == 64
