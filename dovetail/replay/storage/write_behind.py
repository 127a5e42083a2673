"""A thread that writes behind: what is put to it is done in order, while others go on."""

import threading
from collections import deque
from collections.abc import Callable

from dovetail.errors import UserError

Write = Callable[[], None]
Done = Callable[[UserError | None], None]


class Behind:
    """Writes one thing after the other; when one fails, those behind it are left out."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Write | None, Done | None]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self.failure: UserError | None = None
        """Why something could not be written."""
        threading.Thread(target=self._work, daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether all that was put is done."""
        return not self._queue and not self._busy

    def write(self, write: Write) -> None:
        """Something to be written."""
        self._put(write, None)

    def then(self, done: Done) -> None:
        """Something to be called when all that was put before is written, or could not be."""
        self._put(None, done)

    def flush(self) -> None:
        """Waits until all is done."""
        with self._changed:
            while not self.idle:
                self._changed.wait()

    def _put(self, write: Write | None, done: Done | None) -> None:
        with self._changed:
            self._queue.append((write, done))
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                if not self._queue:
                    self._changed.notify_all()
                while not self._queue:
                    self._changed.wait()
                self._busy = True  # before it is taken: at no time does it look idle
                write, done = self._queue.popleft()
            if write is not None and self.failure is None:
                try:
                    write()
                except UserError as failure:
                    self.failure = failure
            if done is not None:
                done(self.failure)
