"""Ends a hang of environments that the caller's own thread steps.

Only a signal wakes a thread from a system call. The handler raises the error, but only inside an
environment: between two steps the error could leave a half-updated state behind.
"""

import signal
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

SIGNAL = signal.SIGURG
"""A signal that does nothing when nobody handles it."""


class Interruption:
    """Raises an error in the main thread on request of another one, inside certain functions."""

    def __init__(self, *inside: Callable[..., Any]) -> None:
        """Only a call made while one of the functions `inside` runs is interrupted."""
        self._codes = {_code(function) for function in inside}
        self._error: Callable[[], Exception | None] = lambda: None
        self.possible = threading.current_thread() is threading.main_thread()
        """Whether there is a thread to interrupt: Python handles signals in the main thread."""
        self._before = signal.signal(SIGNAL, self._handle) if self.possible else None

    def request(self, error: Callable[[], Exception | None]) -> None:
        """Calls `error` in the main thread and raises its result; None if the reason is gone."""
        self._error = error
        signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)

    def close(self) -> None:
        """Restores the handler of the signal; safe to call twice."""
        in_main = threading.current_thread() is threading.main_thread()
        if self.possible and in_main and signal.getsignal(SIGNAL) == self._handle:
            signal.signal(SIGNAL, self._before)

    def _handle(self, _: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code in self._codes:
                error = self._error()
                if error is not None:
                    raise error
                return
            frame = frame.f_back


def _code(function: Callable[..., Any]) -> CodeType:
    code: CodeType = function.__code__  # type: ignore[attr-defined]
    return code
