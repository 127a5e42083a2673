"""The current status of a run: status.json, written by a background thread every two seconds.

It is written even while training waits for a worker, so that another process can find out why. To
request stack traces, create the file `stacks.asked`; the traces of all threads then appear in
`stacks.txt`. A signal handler (faulthandler) would answer at any moment, but it reads the frames of
running threads, which crashes the process now and then.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.errors import UserError
from dovetail.run.folder import Run, write_atomically

FILE, STACKS, ASKED = "status.json", "stacks.txt", "stacks.asked"
EVERY = 2.0
LOOKS = 0.1
"""Seconds between two checks for a request."""
MESSAGES = 50
"""Number of latest messages to keep."""
LONGEST = 10_000
"""Number of characters kept of a traceback, from its end."""


class Status:
    """Writes the results of `workers()` and `progress()` until closed.

    Its thread calls both functions.
    """

    def __init__(
        self,
        run: Run,
        workers: Callable[[], Sequence[Mapping[str, object]]],
        progress: Callable[[], dict[str, Any]],
    ) -> None:
        self._run, self._workers, self._progress = run, workers, progress
        self._messages: deque[tuple[float, str]] = deque(maxlen=MESSAGES)
        self._ended = threading.Event()
        self._ending = self._traceback = ""
        self._before = self._file.read_bytes() if self._file.exists() else None
        self._forget()
        self._thread = threading.Thread(target=self._work, name="dovetail-status", daemon=True)
        self._thread.start()

    def message(self, text: str) -> None:
        """Adds a message to the status."""
        self._messages.append((time.time(), text))

    @property
    def _file(self) -> Path:
        return self._run.path / FILE

    def withdraw(self) -> None:
        """Closes and restores the earlier status file: this start was rejected."""
        self.close()
        if self._before is not None:
            write_atomically(self._file, self._before)

    def close(self, ending: str = "", error: BaseException | None = None) -> None:
        """Writes the final status: how the run ended, with the traceback of `error`; safe to call
        twice."""
        if self._ended.is_set():
            return
        self._ending = ending or "done"
        if isinstance(error, Exception):
            self._traceback = "".join(traceback.format_exception(error))[-LONGEST:]
        self._ended.set()
        self._thread.join()
        self._forget()

    def _forget(self) -> None:
        for name in (ASKED, STACKS):
            (self._run.path / name).unlink(missing_ok=True)

    def _work(self) -> None:
        ended = False
        while True:
            with contextlib.suppress(UserError):  # metrics and checkpoints report a full disk
                self._run.write_json(FILE, self._now(ended))
            if ended:
                return
            ended = self._answer(time.monotonic() + EVERY)

    def _answer(self, until: float) -> bool:
        """Answers requests for stack traces until `until`; returns whether the run ended."""
        asked = self._run.path / ASKED
        while (left := until - time.monotonic()) > 0:
            if self._ended.wait(min(left, LOOKS)):
                return True
            if asked.exists():
                with contextlib.suppress(OSError, UserError):  # the requester times out
                    asked.unlink()
                    write_atomically(self._run.path / STACKS, _stacks())
        return False

    def _now(self, ended: bool) -> dict[str, Any]:
        return {
            "time": time.time(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "ended": self._ending if ended else None,
            "traceback": self._traceback,
            **self._progress(),
            "workers": [] if ended else self._workers(),
            "messages": [{"time": when, "text": text} for when, text in self._messages],
        }


def _stacks() -> str:
    """The stack traces of all other threads."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    told: list[str] = []
    for number, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
        if number != threading.get_ident():
            name = threads[number].name if number in threads else "of no name"
            told += [f"thread {name}, latest call last:\n", *traceback.format_stack(frame), "\n"]
    return "".join(told)
