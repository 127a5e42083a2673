"""Ctrl-C and SIGTERM: the first asks for a clean end, a second Ctrl-C ends at once."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class Stopped(KeyboardInterrupt):
    """Training was asked to stop, and did; its text is a sentence that says what was saved."""

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.code = code
        """What a program that ends here should exit with."""


class Stop:
    """Whether somebody has asked for the end, and who."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def ask(self, number: int, _: FrameType | None = None) -> None:
        """The signal handler."""
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)

    def stopped(self, what_was_saved: str) -> Stopped:
        """The exception that passes the question on, once everything is saved."""
        assert self.signal is not None
        by = "Ctrl-C" if self.signal == signal.SIGINT else self.signal.name
        return Stopped(f"Stopped by {by} {what_was_saved}", 128 + self.signal)


@contextmanager
def stopping() -> Generator[Stop]:
    """Turns SIGINT and SIGTERM into a question while the block runs (in the main thread)."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
