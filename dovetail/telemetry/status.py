"""What a run is doing this moment: status.json, written by a thread of its own every two seconds.

It goes on being written while the training waits for a worker, so that somebody else can ask why.
Whoever makes a file `stacks.asked` finds the lines of code at which every thread stands in
`stacks.txt` soon after. A signal handler could tell them at any moment, but reads the frames of
threads while these run, and that ends a process now and then.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.errors import UserError
from dovetail.run.folder import Run, write_atomically

FILE, STACKS, ASKED = "status.json", "stacks.txt", "stacks.asked"
EVERY = 2.0
LOOKS = 0.1
"""Seconds between two looks whether somebody asks."""
MESSAGES = 50
"""The latest ones are kept."""
LONGEST = 10_000
"""Characters of a traceback, the last ones."""


class Status:
    """Writes what `workers` and `progress` say until it is closed."""

    def __init__(
        self,
        run: Run,
        workers: Callable[[], list[dict[str, Any]]],
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
        """Keeps what people were told."""
        self._messages.append((time.time(), text))

    @property
    def _file(self) -> Path:
        return self._run.path / FILE

    def withdraw(self) -> None:
        """Ends it as if nothing had been written: this start was refused."""
        self.close()
        if self._before is not None:
            write_atomically(self._file, self._before)

    def close(self, ending: str = "", error: BaseException | None = None) -> None:
        """Writes for the last time, with how the run ended, and the traceback of the error that
        ended it; safe to call twice."""
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
            with contextlib.suppress(UserError):  # a full disk is told by who writes what matters
                self._run.write_json(FILE, self._now(ended))
            if ended:
                return
            ended = self._answer(time.monotonic() + EVERY)

    def _answer(self, until: float) -> bool:
        """Tells who asks where the threads stand, for a while; returns whether the run ended."""
        asked = self._run.path / ASKED
        while (left := until - time.monotonic()) > 0:
            if self._ended.wait(min(left, LOOKS)):
                return True
            if asked.exists():
                with contextlib.suppress(OSError, UserError):  # who asks is told of silence
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
    """The lines of code at which every other thread stands."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    told: list[str] = []
    for number, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
        if number != threading.get_ident():
            name = threads[number].name if number in threads else "of no name"
            told += [f"thread {name}, latest call last:\n", *traceback.format_stack(frame), "\n"]
    return "".join(told)
