"""What every worker is doing and since when: so that nothing hangs in silence."""

import sys
import threading
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager


class Watch:
    """One worker's word of what it is at; written by it alone, read by who supervises."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.since = time.perf_counter()
        """When it last got on."""
        self.what = "starting"
        self.waits = False
        """Whether it waits for another worker."""
        self.waited = 0.0
        """Seconds spent waiting for others, in all."""
        self._thread: int | None = None

    def begin(self) -> None:
        """Called in the worker's own thread."""
        self._thread = threading.get_ident()

    def doing(self, what: str) -> None:
        """It begins something."""
        self.what = what
        self.since = time.perf_counter()

    def beat(self) -> None:
        """It got on with what it does."""
        self.since = time.perf_counter()

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        """It waits for another worker while the block runs."""
        before = self.what
        began = time.perf_counter()
        self.doing(f"waiting for {what}")
        self.waits = True
        try:
            yield
        finally:
            self.waits = False
            self.waited += time.perf_counter() - began
            self.doing(before)

    def quiet(self) -> float:
        """Seconds since it last got on."""
        return time.perf_counter() - self.since

    def where(self) -> str:
        """The lines of code at which its thread stands."""
        frame = sys._current_frames().get(self._thread or 0)  # pyright: ignore[reportPrivateUsage]
        return "".join(traceback.format_stack(frame)[-6:]) if frame is not None else ""
