"""One writer per folder: a lock file that names its process.

The operating system frees the lock when the process dies, however it dies. Where a file system does
not lock between machines, the file still says which host and process wrote it.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from dovetail.errors import UserError

FILE = "writer.lock"
ATTEMPTS, AGAIN_SECONDS = 50, 0.01
"""How often, and how soon, to try again while another process takes or leaves the lock."""


class Writer(NamedTuple):
    """The process that wrote a lock."""

    host: str
    pid: int
    started: int | None
    """When it started, in the kernel's own unit: a later process may have the same number."""


class FolderLock:
    """The right to write to a folder, until closed or until this process ends."""

    def __init__(self, folder: Path, what: str) -> None:
        """Raises if another process has the lock; `what` is the kind of folder, for messages."""
        self._path = folder / FILE
        self._file: int | None = None
        for attempt in range(ATTEMPTS):
            self._file = self._taken(folder, what, last=attempt == ATTEMPTS - 1)
            if self._file is not None:
                break
            time.sleep(AGAIN_SECONDS)

    def _taken(self, folder: Path, what: str, last: bool) -> int | None:
        """The locked file; None if it was removed meanwhile, by the writer before us, or if its
        holder has not written its name yet, except in the `last` attempt."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(
                f"Cannot lock {folder} ({error.strerror or error}): make the folder writable, or "
                "work on a copy of it."
            ) from error
        writer = _read(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = False
        except BlockingIOError:
            held = True
        except OSError:  # a file system without locks: the process named in the file decides
            held = writer is not None and writer.host == socket.gethostname() and _lives(writer)
        try:
            if not last and ((held and writer is None) or not _same_file(file, self._path)):
                os.close(file)
                return None
            _refuse_other(folder, what, writer, held)
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(_this_process()._asdict()).encode(), 0)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(file)
            raise
        return file

    def close(self) -> None:
        """Frees the folder; safe to call twice."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                if _same_file(file, self._path):
                    self._path.unlink()
            os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        file, self._file = getattr(self, "_file", None), None
        if file is not None:
            os.close(file)


def is_abandoned(folder: Path) -> bool:
    """Whether a folder has a lock of this host whose process has died."""
    try:
        file = os.open(folder / FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        writer = _read(file)
        return writer is not None and writer.host == socket.gethostname()
    except OSError:
        return False
    finally:
        os.close(file)


def _refuse_other(folder: Path, what: str, writer: Writer | None, held: bool) -> None:
    if writer is None:
        if held:
            raise UserError(
                f"{folder} is in use by another process: wait until it ends, or work on a copy."
            )
        return
    who = f"process {writer.pid} on {writer.host}"
    if held:
        raise UserError(
            f"{folder} is in use by {who}, and a {what} has one writer: end that process first."
        )
    if writer.host != socket.gethostname():
        raise UserError(
            f"{folder} was last written by {who}, which cannot be asked from here whether it still "
            f"runs: once you know that it has ended, remove {folder / FILE}."
        )


def _this_process() -> Writer:
    return Writer(socket.gethostname(), os.getpid(), _started(os.getpid()))


def _lives(writer: Writer) -> bool:
    """Whether a process of this host is alive, and the one that wrote the lock."""
    try:
        os.kill(writer.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return writer.started is None or _started(writer.pid) in (None, writer.started)


def _started(pid: int) -> int | None:
    """The start time of a process; None where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _read(file: int) -> Writer | None:
    """The writer that a lock names; None if it names none."""
    try:
        found: Any = json.loads(os.pread(file, 4096, 0))
        host, pid, started = found["host"], found["pid"], found["started"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    usual = isinstance(host, str) and isinstance(pid, int) and pid > 0
    return Writer(host, pid, started if isinstance(started, int) else None) if usual else None


def _same_file(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
