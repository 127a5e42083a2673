"""A background thread that performs writes in order while callers continue."""

import threading
from collections import deque
from collections.abc import Callable

from dovetail.errors import UserError

Write = Callable[[], None]
Done = Callable[[UserError | None], None]


class Behind:
    """Performs writes one after another; after a failure, later ones are skipped."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Write | None, Done | None]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self.failure: UserError | None = None
        """Why a write failed."""
        threading.Thread(target=self._work, daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether everything queued is done."""
        return not self._queue and not self._busy

    def write(self, write: Write) -> None:
        """Queues a write."""
        self._put(write, None)

    def then(self, done: Done) -> None:
        """Queues a callback that the thread calls once all earlier writes are done or failed."""
        self._put(None, done)

    def flush(self) -> None:
        """Waits until everything queued is done."""
        with self._changed:
            while not self.idle:
                self._changed.wait()

    def _put(self, write: Write | None, done: Done | None) -> None:
        with self._changed:
            self._queue.append((write, done))
            self._changed.notify_all()

    def _work(self) -> None:
        """The body of the thread."""
        while True:
            with self._changed:
                self._busy = False
                if not self._queue:
                    self._changed.notify_all()
                while not self._queue:
                    self._changed.wait()
                self._busy = True  # before popping, so that it never looks idle in between
                write, done = self._queue.popleft()
            if write is not None and self.failure is None:
                try:
                    write()
                except UserError as failure:
                    self.failure = failure
            if done is not None:
                done(self.failure)
