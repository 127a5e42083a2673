"""`doctor`: checks this machine, or finds out why a run is stuck, without searching logs."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from dovetail.envs.member import LOG
from dovetail.envs.registry import BACK_ENDS
from dovetail.errors import UserError, command
from dovetail.run.folder import Run
from dovetail.telemetry.status import ASKED, EVERY, FILE, STACKS

PACKAGES = (
    "dovetail",
    "jax",
    "jaxlib",
    "numpy",
    "gymnasium",
    "gymnax",
    "optax",
    "orbax-checkpoint",
)
EXTRAS = {
    "ray": "ray",
    **{row.title.lower(): row.extra for row in BACK_ENDS.values() if row.extra},
    "mujoco": "mujoco",
    "wandb": "wandb",
    "mlflow-skinny": "mlflow",
}
"""Optional packages, each with the extra that installs it."""
LITTLE_MEMORY, LITTLE_DISK = 64 << 20, 1 << 30
LATE = 5 * EVERY
"""Seconds without a new status after which the process counts as gone or stopped."""
SLOW = 30.0
"""Seconds without a report after which a run counts as stuck."""

Level = Literal["good", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """One finding: a sentence and its severity."""

    level: Level
    text: str


def doctor(run: str | Path | Run | None = None) -> list[Finding]:
    """Examines this machine, or a run on it."""
    if run is None:
        return list(_machine())
    return list(_of_run(run if isinstance(run, Run) else Run.open(run)))


def stacks(run: str | Path | Run, seconds: float = 5.0) -> str:
    """The stack traces of all threads of a running run and of its environment processes on this
    machine. `seconds` is the time limit for each answer."""
    opened = run if isinstance(run, Run) else Run.open(run)
    status = _status(opened)
    if status["ended"] is not None or not _is_alive(status):
        raise UserError(f"{opened.path} is not running: there is nobody to ask.")
    if status["host"] != socket.gethostname():
        raise UserError(f"{opened.path} runs on {status['host']}: ask there.")
    pid = status["pid"]
    parts = [f"process {pid}\n{_ask(opened, pid, seconds)}"]
    for child, log in _environments(pid):
        told = _ask_environments(child, log, seconds) or "It did not answer.\n"
        parts.append(f"process {child}, which steps environments\n{told}")
    return "\n".join(parts)


def _ask(run: Run, pid: int, seconds: float) -> str:
    """Requests the stack traces of a run's process by a file in its folder; returns them."""
    asked, answer = run.path / ASKED, run.path / STACKS
    before = _made(answer)
    try:
        asked.touch()
    except OSError as error:
        raise UserError(
            f"{run.path} cannot be asked: no file can be made there ({error.strerror})."
        ) from error
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if _made(answer) not in (before, None):
            with contextlib.suppress(FileNotFoundError):  # the run has just ended and removed it
                return answer.read_text(encoding="utf-8")
    asked.unlink(missing_ok=True)
    raise UserError(
        f"Process {pid} of {run.path} did not answer in {seconds:g} s: it has just ended, is "
        f"stopped, or something in it keeps Python's threads from running."
    )


def _made(file: Path) -> tuple[int, int] | None:
    """Identifies a version of a file, which may be replaced under the same name."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _ask_environments(pid: int, log: Path, seconds: float) -> str | None:
    """Requests the stack trace of an environment process by SIGUSR1; returns it from its log."""
    try:
        before = log.stat().st_size
        os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if log.stat().st_size > before:
                time.sleep(0.1)  # lets the process write the rest
                return log.read_bytes()[before:].decode(errors="replace")
            time.sleep(0.05)
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return None
    return None


def _environments(pid: int) -> Iterator[tuple[int, Path]]:
    """The environment processes under a process, each with its log file; Linux only.

    Only processes that handle SIGUSR1 are included: the signal would kill others.
    """
    for child in _children(pid):
        try:
            caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{child}/status").read_text())
            files = list(Path(f"/proc/{child}/fd").iterdir())
            logs = [file for file in files if Path(os.readlink(file)).name.startswith(LOG)]
        except OSError:  # it has just ended
            continue
        if logs and caught and int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1:
            yield child, logs[0]


def _children(pid: int) -> list[int]:
    """The child processes of all threads of a process."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            found += map(int, listed.read_text().split())
    return found


def _machine() -> Iterator[Finding]:
    yield Finding("good", f"Python {sys.version.split()[0]} at {sys.executable}")
    yield Finding("good", ", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    for name, extra in EXTRAS.items():
        found = _version(name)
        if found == "missing":
            yield Finding("note", f"{name} is not installed (the extra {extra!r} brings it)")
        else:
            yield Finding("good", f"{name} {found}")
    cores = os.cpu_count() or 1
    yield Finding("good", f"{cores} cores, {_gigabytes(_memory())} of memory free")
    yield from _devices()
    yield from _room("/dev/shm", LITTLE_MEMORY, "environment processes hand arrays over there")
    yield from _room(".", LITTLE_DISK, "runs are written there")


def _devices() -> Iterator[Finding]:
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        yield Finding("bad", f"JAX finds no device: {error}")
        return
    kinds = sorted({device.platform for device in devices})
    yield Finding("good", f"JAX has {len(devices)} device(s): {', '.join(kinds)}")


def _room(place: str, little: int, why: str) -> Iterator[Finding]:
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        yield Finding("bad", f"{place} cannot be used ({error.strerror}): {why}")
        return
    level: Level = "bad" if free < little else "good"
    yield Finding(level, f"{_gigabytes(free)} free in {os.path.abspath(place)}: {why}")


def _of_run(run: Run) -> Iterator[Finding]:
    status = _status(run)
    now = time.time()
    age = now - status["time"]
    if status["ended"] is not None:
        failed = bool(status.get("traceback"))
        yield Finding("bad" if failed else "good", f"It has ended: {status['ended']}")
        if failed:
            yield Finding("note", status["traceback"].rstrip())
            yield from _room(str(run.path), LITTLE_DISK, "the run is written there")
        return
    alive = _is_alive(status)
    if not alive:
        again = command("train", "--resume", run.path)
        yield Finding(
            "bad",
            f"Its process {status['pid']} is gone since {age:.0f} s without saying why: it was "
            f"killed; go on with {again}",
        )
    elif age > LATE:
        yield Finding("bad", f"Process {status['pid']} is there, but stopped {age:.0f} s ago")
    else:
        yield Finding("good", f"Process {status['pid']} on {status['host']} is alive")
    since = now - status["last_report"] if status["last_report"] else age
    level: Level = "bad" if since > SLOW else "good"
    yield Finding(level, f"{status['env_steps']:,} steps; the last report came {since:.0f} s ago")
    for worker in status["workers"]:
        yield _of_worker(worker) if alive else _of_dead_worker(worker)
    yield from _room(str(run.path), LITTLE_DISK, "the run is written there")
    for message in status["messages"][-10:]:
        ago = now - message["time"]
        yield Finding("note", f"{ago:.0f} s ago: {message['text']}")


def _of_worker(worker: dict[str, Any]) -> Finding:
    quiet = worker["quiet_s"]
    if worker["waits_for"]:
        level: Level = "note" if quiet > SLOW else "good"
        return Finding(level, f"{worker['name']} waits for {worker['waits_for']} ({quiet:.0f} s)")
    level = "bad" if quiet > SLOW else "good"
    return Finding(level, f"{worker['name']} is {worker['doing']} ({quiet:.0f} s)")


def _of_dead_worker(worker: dict[str, Any]) -> Finding:
    """What a worker did when its process was last heard of."""
    waited = f"was waiting for {worker['waits_for']}"
    last = waited if worker["waits_for"] else f"was {worker['doing']}"
    return Finding("note", f"{worker['name']} {last} when it was killed")


def _status(run: Run) -> dict[str, Any]:
    try:
        return json.loads((run.path / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{run.path} has no {FILE}: it has not begun, or is of an older version of Dovetail."
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{run.path / FILE} cannot be read ({error}).") from error


def _is_alive(status: dict[str, Any]) -> bool:
    """Whether the run's process exists; on another machine, whether its status is recent."""
    if status["host"] != socket.gethostname():
        return time.time() - status["time"] < LATE
    try:
        os.kill(status["pid"], 0)  # signal 0 only tests whether the process exists
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists, but belongs to another user
        return True
    return True


def _memory() -> int:
    """Available memory in bytes; 0 if unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":") for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def _gigabytes(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
