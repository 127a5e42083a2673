"""Ctrl-C, SIGTERM and SIGHUP: the first requests a clean stop, a second one stops at once.

Before training begins there is nothing to save, so that the first one ends the start-up.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
APART_SECONDS = 1.0
"""Two signals within this time are one: `timeout` sends its own to the process and to its group."""
AGAIN_SECONDS = 0.05
"""Delay before a signal that arrived during an import is sent again."""


class Stopped(KeyboardInterrupt):
    """Training stopped on request; the message says what was saved."""

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.code = code
        """The exit code for the program."""


class Stop:
    """Whether a stop was requested, and by which signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._since = 0.0
        self._begun: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def training(self, ask_to_stop: Callable[[], None]) -> None:
        """Training begins: from now on the first signal calls `ask_to_stop` instead of raising."""
        self._begun = ask_to_stop
        if self.signal is not None:
            ask_to_stop()

    def ask(self, number: int, frame: FrameType | None = None) -> None:
        """The signal handler; runs in the main thread."""
        if self.signal is not None and self._begun is not None:
            if number == signal.SIGINT or time.monotonic() - self._since > APART_SECONDS:
                raise KeyboardInterrupt  # a second one stops at once
            return
        self.signal, self._since = self.signal or signal.Signals(number), time.monotonic()
        if self._begun is not None:
            self._begun()
        elif _importing(frame):  # some extension modules do not survive an exception while loading
            again = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
        else:
            raise self.stopped("before training began.")

    def stopped(self, what_was_saved: str) -> Stopped:
        """The exception to raise once everything is saved."""
        assert self.signal is not None
        by = "Ctrl-C" if self.signal == signal.SIGINT else self.signal.name
        return Stopped(f"Stopped by {by} {what_was_saved}", 128 + self.signal)


@contextmanager
def stopping() -> Generator[Stop]:
    """Turns these signals into a stop request while the block runs; ignored ones stay ignored."""
    stop = Stop()
    # Python allows signal handlers in the main thread only; elsewhere the caller handles signals.
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    wanted = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop.ask) for number in wanted}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
