"""Waiting for what another thread or process does."""

import threading
import time
from collections.abc import Callable
from typing import Any

from dovetail.runtime.heartbeat import Watch

SECONDS = 20.0
"""After so long a test gives up."""


def eventually(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What it gives once that is true; fails after the limit."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)
    return found


class Waiting:
    """A call in a thread of its own; it is given a watch as its last argument."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.watch = Watch("test")
        self._result: Any = None
        self._error: Exception | None = None
        self._call, self._arguments = call, arguments
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call(*self._arguments, self.watch)
        except Exception as error:
            self._error = error

    @property
    def waits(self) -> bool:
        """Whether it has come to a halt inside the call, rather than returned."""
        while self._thread.is_alive() and not (self.watch.waits and self.watch.awaited):
            time.sleep(0.001)
        return self._thread.is_alive()

    def returned(self) -> Any:
        """What the call gave; raises what it raised."""
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), f"still waiting for {self.watch.awaited}"
        if self._error is not None:
            raise self._error
        return self._result
