"""Pipelined messages to a server: sent before earlier ones are answered.

An answer is for the next message, or acknowledges several at once and says how many.
"""

from dovetail.errors import UserError
from dovetail.replay.service.channel import COUNT, ServerConnection


class Pipeline:
    """Messages in flight to a server, up to `window` of them."""

    def __init__(self, channel: ServerConnection, window: int) -> None:
        self.channel, self.window = channel, window
        self._flying = 0
        self._failure: UserError | None = None
        self._skipped = 0
        self.failures = 0
        self.acknowledged = 0
        """Number of messages that were answered and not refused."""
        self._limit: float | None = None

    def send(
        self, message: bytes, timeout: float | None = None, arrays: memoryview | None = None
    ) -> None:
        """Sends a message once there is room for it; raises an earlier failure first."""
        self.make_room()
        self._limit = timeout
        self.channel.send(message, arrays)
        self._flying += 1

    def make_room(self) -> None:
        """Waits for the oldest answer if the window is full."""
        if self._flying >= self.window:
            self._receive()
            self._raise()

    def flush(self) -> None:
        """Waits for all answers; raises a failure."""
        while self._flying:
            self._receive()
        self._raise()

    def ask(self, message: bytes, what: str) -> bytes:
        """Sends a message and waits for its answer."""
        self.flush()
        self.channel.send(message)
        return self.channel.receive(what)

    def _receive(self) -> None:
        """Waits for one answer; keeps the first failure for `_raise`."""
        try:
            answer = self.channel.receive("an acknowledgment", self._limit)
            (count,) = COUNT.unpack(answer) if answer else (1,)
            self._flying -= count
            self.acknowledged += count
        except UserError as failure:
            self._flying -= 1
            if self._failure is None:
                # The first one; those behind it were refused because of it.
                self._failure = failure
            else:
                self._skipped += 1

    def _raise(self) -> None:
        """Raises the failure, once everything sent behind it has been answered."""
        if self._failure is None:
            return
        while self._flying:  # sent before the failure was known, and refused because of it
            self._receive()
        failure, skipped = self._failure, self._skipped
        self._failure, self._skipped = None, 0
        # Sent with every insert: the server refuses those sent before the client knew.
        self.failures += 1
        behind = f" {skipped} more that had been sent behind it were left out." if skipped else ""
        raise UserError(f"{failure}{behind}") from failure
