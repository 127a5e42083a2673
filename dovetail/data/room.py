"""Reserves disk space for a file written by a library that does not survive a full disk."""

import os

STEP = 1 << 20
"""Space is reserved in multiples of this many bytes."""


class Room:
    """Reserved space of an open file: writes within it cannot fail for lack of space."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._needed = self._taken = 0

    def take(self, count: int) -> None:
        """Reserves `count` more bytes; raises an OSError if the disk is full."""
        self._needed += count
        if self._needed > self._taken and hasattr(os, "posix_fallocate"):
            wanted = -(-self._needed // STEP) * STEP
            os.posix_fallocate(self._descriptor, self._taken, wanted - self._taken)
            self._taken = wanted
