"""Room on the disk for a file that a library writes which does not survive a full one."""

import os

STEP = 1 << 20
"""Bytes that room is taken in."""


class Room:
    """Room for a file that is open: what was taken is there when it is written to."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._needed = self._taken = 0

    def take(self, count: int) -> None:
        """Takes room for as many more bytes; raises an OSError if there is none."""
        self._needed += count
        if self._needed > self._taken and hasattr(os, "posix_fallocate"):
            wanted = -(-self._needed // STEP) * STEP
            os.posix_fallocate(self._descriptor, self._taken, wanted - self._taken)
            self._taken = wanted
