"""What every worker is doing and since when: so that nothing hangs in silence."""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

COMPILE_SECONDS = 300.0
"""How long a worker's first iteration may take, which may compile."""


class Watch:
    """One worker's word of what it is at; written by it alone, read by who supervises."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.since = time.perf_counter()
        """When it last got on."""
        self.what = "starting"
        self.waits = True
        """Whether it waits for another worker, or has nothing to do."""
        self.warm = False
        """Whether it has done everything once, so that nothing is left to compile."""
        self.awaited = ""
        """What it waits for."""
        self.stepping = False
        """Whether it steps environments: each step is a sign of life."""
        self.waited = 0.0
        """Seconds spent waiting for others, in all."""
        self._began_to_wait = 0.0
        self._thread: int | None = None
        self._bed = threading.Lock()
        self._bed.acquire()

    def begin(self) -> None:
        """Called in the worker's own thread."""
        self._thread = threading.get_ident()

    def doing(self, what: str) -> None:
        """It begins something."""
        self.what, self.waits, self.stepping = what, False, False
        self.since = time.perf_counter()

    def idle(self, awaited: str = "something to do") -> None:
        """It has nothing to do."""
        self.waits, self.awaited = True, awaited

    def beat(self) -> None:
        """It got on with what it does."""
        self.since = time.perf_counter()

    def sleep(self, what: str) -> None:
        """It waits for another worker until `wake` is called, once for each sleep."""
        self.waiting(what)
        self._bed.acquire()
        self.waited_until_now()

    def waiting(self, what: str) -> None:
        """It begins to wait for another worker."""
        self.waits, self.awaited = True, what
        self._began_to_wait = time.perf_counter()

    def waited_until_now(self) -> None:
        """What it waited for is there."""
        self.since = time.perf_counter()
        self.waited += self.since - self._began_to_wait
        self.waits = False

    def wake(self) -> None:
        """Ends the sleep."""
        self._bed.release()

    def quiet(self) -> float:
        """Seconds since it last got on."""
        return time.perf_counter() - self.since

    def late(self, patience: float) -> bool:
        """Whether it has something to do and does not get on; compiling is given longer."""
        limit = patience if self.warm else max(patience, COMPILE_SECONDS)
        return not self.waits and self.quiet() > limit

    def where(self) -> str:
        """The lines of code at which its thread stands."""
        frame = sys._current_frames().get(self._thread or 0)  # pyright: ignore[reportPrivateUsage]
        return "".join(traceback.format_stack(frame)[-6:]) if frame is not None else ""

    def status(self) -> dict[str, Any]:
        """What it is at, for people."""
        return {
            "name": self.worker,
            "doing": self.what,
            "waits_for": self.awaited if self.waits else "",
            "quiet_s": round(self.quiet(), 1),
        }

    def complaint(self) -> str:
        """What is wrong with it, if it does not get on."""
        return (
            f"{self.worker} has been {self.what} for {self.quiet():.0f} s; it stands at\n"
            f"{self.where()}"
        )


class Watchdog:
    """A thread that tells, once, of every worker that does not get on for longer than patience."""

    def __init__(
        self, watches: Sequence[Watch], patience: float, tell: Callable[[str], None]
    ) -> None:
        self._watches, self._patience, self._tell = watches, patience, tell
        self._told: dict[str, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="dovetail-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(min(1.0, self._patience / 4)):
            for watch in self._watches:
                if watch.late(self._patience) and self._told.get(watch.worker) != watch.since:
                    self._told[watch.worker] = watch.since
                    self._tell(watch.complaint())
