"""Makes Ctrl-C reliable.

Python swallows exceptions in destructors and garbage-collector callbacks, even KeyboardInterrupt,
and JAX has such a callback that runs constantly during tracing. A swallowed interrupt is sent
again. So is one that arrives during an import, because some extension modules do not survive an
exception while loading. `Interrupts.seen` remembers interrupts that an extension turned into
another exception.
"""

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

AGAIN_SECONDS = 0.01
"""Delay before an interrupt is sent again, so that the callback can finish."""


class Interrupts:
    """The SIGINT handler; remembers whether there was an interrupt."""

    def __init__(self, last: bool) -> None:
        self.seen = False
        self._last = last

    def over(self) -> None:
        """Restores the default handler once everything is saved, if the process is about to end."""
        if self._last:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.seen = True
        if _importing(frame):
            _send_again()
        else:
            signal.default_int_handler(number, frame)


@contextmanager
def insisting(last: bool = False) -> Generator[Interrupts]:
    """Raises KeyboardInterrupt for every SIGINT while the block runs, in the main thread.

    `last` says that the process ends after the block. Does nothing outside the main thread or if
    the program has its own handler.
    """
    interrupts = Interrupts(last)
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or not _in_main_thread():
        yield interrupts
        return
    forget = sys.unraisablehook

    def insist(forgotten: Any) -> None:
        if issubclass(forgotten.exc_type, KeyboardInterrupt):
            _send_again()
        else:
            forget(forgotten)

    signal.signal(signal.SIGINT, interrupts.handle)
    sys.unraisablehook = insist
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if last else signal.default_int_handler)
        sys.unraisablehook = forget


def _send_again() -> None:
    again = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
