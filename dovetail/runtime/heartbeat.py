"""The current activity of every worker, to detect and report workers that are stuck."""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TypedDict

COMPILE_SECONDS = 300.0
"""Time limit of a worker's first iteration, which may compile."""
STOP_SECONDS = 10.0
"""Time limit of the updates in flight once a stop is requested; later they are dropped."""


class Activity(TypedDict):
    """The activity of a worker, as the run's status and `dovetail doctor` show it."""

    name: str
    doing: str
    waits_for: str
    """Empty while it works."""
    quiet_s: float
    """Seconds since its last progress."""


class Watch:
    """The activity of one worker: written by its thread, read by supervising threads.

    There is no lock: each field is one reference, and a reader that sees an old one looks again
    later.
    """

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.since = time.perf_counter()
        """Time of its last progress."""
        self.what = "starting"
        self.waits = True
        """Whether it waits for another worker or is idle."""
        self.warm = False
        """Whether it has completed an iteration, so that nothing is left to compile."""
        self.awaited = ""
        """The thing it waits for."""
        self.stepping = False
        """Whether it steps environments, each step being a sign of life."""
        self.waited = 0.0
        """Total seconds spent waiting for other workers."""
        self._began_to_wait = 0.0
        self._thread: int | None = None
        # Held from the start: `sleep` acquires it again and blocks until `wake` releases it.
        self._bed = threading.Lock()
        self._bed.acquire()

    def begin(self) -> None:
        """Registers the calling thread as the worker's."""
        self._thread = threading.get_ident()

    def doing(self, what: str) -> None:
        """Starts an activity."""
        self.what, self.waits, self.stepping = what, False, False
        self.since = time.perf_counter()

    def idle(self, awaited: str = "something to do") -> None:
        """Marks the worker as idle."""
        self.waits, self.awaited = True, awaited

    def beat(self) -> None:
        """Records progress."""
        self.since = time.perf_counter()

    def sleep(self, what: str) -> None:
        """Blocks until another thread calls `wake`, which must happen once per sleep."""
        self.waiting(what)
        self._bed.acquire()
        self.waited_until_now()

    def waiting(self, what: str) -> None:
        """Starts to wait for another worker."""
        self.waits, self.awaited = True, what
        self._began_to_wait = time.perf_counter()

    def waited_until_now(self) -> None:
        """Stops waiting and adds the time to `waited`."""
        self.since = time.perf_counter()
        self.waited += self.since - self._began_to_wait
        self.waits = False

    def wake(self) -> None:
        """Ends a `sleep`; called from another thread."""
        self._bed.release()

    def quiet(self) -> float:
        """Seconds since its last progress."""
        return time.perf_counter() - self.since

    def late(self, patience: float) -> bool:
        """Whether it is stuck: no progress for `patience` seconds, or longer while compiling."""
        limit = patience if self.warm else max(patience, COMPILE_SECONDS)
        return not self.waits and self.quiet() > limit

    def where(self) -> str:
        """The innermost stack frames of its thread."""
        frame = sys._current_frames().get(self._thread or 0)  # pyright: ignore[reportPrivateUsage]
        return "".join(traceback.format_stack(frame)[-6:]) if frame is not None else ""

    def status(self) -> Activity:
        """Its activity, for display."""
        return {
            "name": self.worker,
            "doing": self.what,
            "waits_for": self.awaited if self.waits else "",
            "quiet_s": round(self.quiet(), 1),
        }

    def complaint(self) -> str:
        """An error message for a stuck worker."""
        return (
            f"{self.worker} has been {self.what} for {self.quiet():.0f} s; it stands at\n"
            f"{self.where()}"
        )


class Watchdog:
    """A thread that reports every stuck worker, once per incident."""

    def __init__(
        self,
        watches: Sequence[Watch],
        patience: float,
        tell: Callable[[str], None],
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """`look` is called at every check as well."""
        self._watches, self._patience, self._tell = watches, patience, tell
        self._called = look
        self._told: dict[str, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="dovetail-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        # Often enough that a short patience, as in tests, is kept to within a quarter.
        while not self._ended.wait(min(1.0, self._patience / 4)):
            for watch in self._watches:
                # `since` identifies the incident: it changes with the next progress.
                if watch.late(self._patience) and self._told.get(watch.worker) != watch.since:
                    self._told[watch.worker] = watch.since
                    self._tell(watch.complaint())
            self._called()
