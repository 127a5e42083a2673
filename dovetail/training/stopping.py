"""Ctrl-C and SIGTERM: the first asks for a clean end, a second Ctrl-C ends at once."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Whether somebody has asked for the end, and who."""

    def __init__(self) -> None:
        self.asked_by: str | None = None

    def __bool__(self) -> bool:
        return self.asked_by is not None

    def ask(self, number: int, _: FrameType | None) -> None:
        """The signal handler."""
        if self.asked_by is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked_by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


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
