"""Assigns streams of a served table to writers, so that several can share it."""

import threading
import time
from typing import Any

from dovetail.errors import UserError

PATIENCE = 5.0
"""Seconds that a writer waits for free streams: the death of another is noticed with a delay."""


class Claims:
    """Ranges of streams, each held by one writer until it disconnects."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._taken: dict[int, tuple[int, int]] = {}
        self._changed = threading.Condition()

    def claim(self, writer: object, count: int, wanted: int) -> int:
        """Reserves `count` streams for the writer, at `wanted` if free; returns the first."""
        limit = time.monotonic() + PATIENCE
        with self._changed:
            while (first := self._free(count, wanted)) is None:
                if count > self._streams or not self._changed.wait(limit - time.monotonic()):
                    raise UserError(
                        f"The replay has room for {self._streams} environments, of which "
                        f"{self._others()} are other writers', and {count} more were to be "
                        "written: serve one for more (dovetail replay --num-envs), or use fewer."
                    )
            self._taken[id(writer)] = (first, first + count)
            return first

    def check(self, writer: object, first: int, last: int) -> None:
        """Raises if the streams belong to another writer."""
        # Without the lock, which every insert would take: a lookup in a dict is atomic.
        if not self._taken or self._taken.get(id(writer)) == (first, last):
            return
        with self._changed:
            for whose, (begin, end) in self._taken.items():
                if whose != id(writer) and first < end and begin < last:
                    raise UserError(
                        f"Environments {begin} to {end} of the replay are another writer's: "
                        "claim some first, and insert for these."
                    )

    def release(self, writer: Any) -> None:
        """Frees the streams of a writer that has disconnected."""
        with self._changed:
            self._taken.pop(id(writer), None)
            self._changed.notify_all()

    def _free(self, count: int, wanted: int) -> int | None:
        taken = sorted(self._taken.values())
        # First fit: the wanted range, the beginning, or right after another writer.
        starts = [wanted, 0, *(end for _, end in taken)]
        for first in starts:
            inside = first >= 0 and first + count <= self._streams
            if inside and all(first >= end or first + count <= begin for begin, end in taken):
                return first
        return None

    def _others(self) -> int:
        return sum(end - begin for begin, end in self._taken.values())
