"""The parent's handle of one environment process: starting, failing and ending it.

No call waits without a time limit. Every failure becomes an error that names the process's
environments.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from multiprocessing import resource_tracker
from multiprocessing.reduction import ForkingPickler, send_handle
from multiprocessing.synchronize import Semaphore
from types import ModuleType
from typing import Any

from dovetail.envs.child import CLOSE, ENDING, ChildJob, serve
from dovetail.envs.segment import COMMAND, FOLDER, LINE
from dovetail.errors import UserError
from dovetail.loading import UNGUARDED, main_file, unguarded

SPAWN = multiprocessing.get_context("spawn")
"""Spawn, because JAX's threads do not survive a fork."""
SLICE = 0.25
"""Seconds between checks that processes are still alive."""
GRACE = 1.0
"""Seconds for closing the environments when asked, and again for exiting when killed."""
LOG = "dovetail-log-"
"""Name prefix of the file to which a process's faulthandler writes."""
_NAME = "dovetail-environments"
_starting = threading.Lock()


class ProcessFailed(UserError):
    """An environment process raised, was killed, or hangs."""

    def __init__(self, sentence: str, traceback: str = "") -> None:
        """`traceback` is the text of the process's own traceback, if available."""
        super().__init__(sentence)
        self.traceback = traceback
        if traceback:
            self.add_note(f"In the process of the environments:\n{traceback.rstrip()}")


class Member:
    """Owns one process and the pipe to it; the segment carries only steps."""

    def __init__(self, job: ChildJob) -> None:
        """Starts the process."""
        self.rows = job.rows
        self.go = job.go.release
        self.words = memoryview(bytes(LINE)).cast("q")
        self._serving = False
        last = job.first + job.rows.stop - 1
        first = job.first + job.rows.start
        which = f"environments {first}…{last}" if last > first else f"environment {first}"
        self._who = f"The process of {which} of {job.env_id}"
        self._env_id = job.env_id
        self._log, name = tempfile.mkstemp(prefix=LOG)
        # Unlinked at once: the open file disappears with its users.
        os.unlink(name)
        self._connection, there = SPAWN.Pipe()
        self._process = SPAWN.Process(target=serve, args=(job, there), name=_NAME, daemon=True)
        # A pickled reference to the main module makes the child import it.
        needs_main = b"_main__" in job.build
        try:
            with starting_process(needs_main):
                self._process.start()
        except OSError as error:
            os.close(self._log)
            raise UserError(
                f"{self._who} cannot be started ({error.strerror}): use fewer processes."
            ) from error
        there.close()
        self.pass_file(self._log)

    def say(self, message: Any) -> None:
        """Sends a message; if the process is gone, the next wait for an answer reports it."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def pass_file(self, descriptor: int) -> None:
        """Passes the process a duplicate of a file descriptor."""
        with contextlib.suppress(OSError):
            send_handle(self._connection, descriptor, self._process.pid or 0)

    def hear(self, limit: float, doing: str) -> Any:
        """The process's next message, within `limit` seconds."""
        deadline = time.monotonic() + limit
        while not self._connection.poll(SLICE):
            if self.dead():
                raise self.death(doing)
            if time.monotonic() > deadline:
                raise self.hanging(limit, doing)
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            self._process.join(GRACE)
            raise self.death(doing) from None

    def dead(self) -> bool:
        """Whether the process has ended."""
        return self._process.exitcode is not None

    def death(self, doing: str) -> UserError:
        """The error that says how it ended."""
        code = self._process.exitcode
        told = self._told(0)
        if code == UNGUARDED:
            return unguarded(self._env_id)
        if code is None or code >= 0:
            how = "cannot be reached" if code is None else f"ended with exit code {code}"
            return ProcessFailed(f"{self._who} {how} {doing}.", told)
        name = signal.Signals(-code).name
        hint = ": the kernel does so when memory runs out" if -code == signal.SIGKILL else ""
        return ProcessFailed(f"{self._who} was killed by {name} {doing}{hint}.", told)

    def hanging(self, limit: float, doing: str) -> ProcessFailed:
        """The error that says where it is stuck, from its own traceback; kills it."""
        before = os.fstat(self._log).st_size
        with contextlib.suppress(OSError):
            os.kill(self._process.pid or 0, signal.SIGUSR1)
        deadline = time.monotonic() + GRACE
        while not (told := self._told(before)) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.01)  # for the rest of the traceback
        told = self._told(before)
        self._process.kill()
        frame = re.search(r'File "(.+)", line (\d+) in (.+)', told)
        where = f": it is in {frame[3]} at {frame[1]}:{frame[2]}" if frame else ""
        return ProcessFailed(
            f"{self._who} did not answer within {limit:g} s {doing}{where}; repair the "
            "environment, or allow it more seconds with the option patience.",
            told,
        )

    def _told(self, start: int) -> str:
        """The output of faulthandler in the process, from byte `start`."""
        return os.pread(self._log, 100_000, start).decode(errors="replace")

    def share(self, words: memoryview) -> None:
        """Sets the process's words in the segment: from now on it serves."""
        self.words = words
        self._serving = True

    def ask_to_close(self) -> None:
        """Asks it to close the environments; kills it if it does not serve yet."""
        if self._serving:
            self.words[COMMAND] = CLOSE
            self.go()
        else:
            self._process.kill()

    def wait(self, deadline: float) -> None:
        """Waits for the process to end."""
        self._process.join(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """Ends the process if it has not ended, and releases its resources."""
        if not self.dead():
            self._process.kill()
            self._process.join(GRACE)
        self._connection.close()
        os.close(self._log)
        with contextlib.suppress(ValueError):  # still alive after SIGKILL: stuck in the kernel
            self._process.close()


def pickled(build: Any, env_id: str) -> bytes:
    """A factory, pickled."""
    try:
        sent = bytes(ForkingPickler.dumps(build))
        if b"__main__" in sent and main_file() is None:
            raise TypeError("it is defined in a notebook or on standard input")
        return sent
    except Exception as error:
        raise UserError(
            f"{env_id} cannot be sent to a process of its own ({error}): define its class or "
            "function at the top of a module or file, not inside a function."
        ) from error


def semaphore(env_id: str) -> Semaphore:
    """A semaphore with value 0 that can be passed to processes."""
    try:
        return SPAWN.Semaphore(0)
    except OSError as error:
        raise UserError(
            f"{env_id}: a semaphore for its processes cannot be made ({error.strerror}): make room "
            f"in {FOLDER}."
        ) from error


@contextlib.contextmanager
def starting_process(needs_main: bool) -> Generator[None]:
    """Processes started inside do not receive Ctrl-C or SIGTERM, and import the main module only if
    they need it. One is started at a time."""
    with _starting, _without_interrupts(), _without_main(not needs_main):
        yield


@contextlib.contextmanager
def _without_interrupts() -> Generator[None]:
    """Processes started inside begin with these signals blocked: terminals and schedulers send them
    to the whole group, but the parent decides when to end. See `leave_signals_to_parent`."""
    resource_tracker.ensure_running()  # starting it later would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _without_main(hide: bool) -> Generator[None]:
    """Processes started inside do not import the main module, so it needs no `__main__` guard."""
    main = sys.modules["__main__"]
    if hide:
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
