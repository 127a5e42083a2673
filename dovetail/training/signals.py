"""Ctrl-C and SIGTERM: the first signal requests a clean stop, a second Ctrl-C stops at once."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


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

    def __bool__(self) -> bool:
        return self.signal is not None

    def ask(self, number: int, _: FrameType | None = None) -> None:
        """The signal handler; runs in the main thread."""
        if self.signal is not None and number == signal.SIGINT:  # a second Ctrl-C stops at once
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)

    def stopped(self, what_was_saved: str) -> Stopped:
        """The exception to raise once everything is saved."""
        assert self.signal is not None
        by = "Ctrl-C" if self.signal == signal.SIGINT else self.signal.name
        return Stopped(f"Stopped by {by} {what_was_saved}", 128 + self.signal)


@contextmanager
def stopping() -> Generator[Stop]:
    """Turns SIGINT and SIGTERM into a stop request while the block runs."""
    stop = Stop()
    # Python allows signal handlers in the main thread only; elsewhere the caller handles signals.
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
