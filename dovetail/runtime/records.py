"""Records of updates, passed from the learner's worker to the thread that waits for them."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dovetail.runtime.arrays import Leaf
from dovetail.runtime.report import UpdatePart

LOOK_SECONDS = 0.25
"""How often a waiting thread checks for failed workers, in seconds."""


@dataclass(frozen=True)
class UpdateRecord:
    """The results of one update."""

    metrics: list[Leaf]
    episodes: list[Leaf]
    state: list[Leaf | None]
    """Leaves of the state, None for those of other sides; empty except for the last requested
    update, to free memory."""
    actor: list[list[Leaf]]
    """Leaves of the actors' state, for each copy; empty when `state` is."""
    parts: list[UpdatePart]
    tapped: list[Leaf]
    """The values of the graph's tap."""


class Records:
    """A queue of records with one producer and one consumer thread."""

    def __init__(self) -> None:
        self._records: deque[UpdateRecord] = deque()
        self._wanted = 1
        self._enough = threading.Event()
        """Set when enough records are there, so that the consumer wakes up only once."""

    def add(self, record: UpdateRecord) -> None:
        """Appends a record; called in the home worker's thread."""
        self._records.append(record)
        if len(self._records) >= self._wanted:
            self._enough.set()

    def take(self, count: int, look: Callable[[], None]) -> list[UpdateRecord]:
        """Waits for and removes the first `count` records.

        Calls `look` meanwhile, which raises if a worker has failed. Called in the thread that
        drives the runtime.
        """
        look()  # raises a failure from before this call
        self._wanted = count
        self._enough.clear()  # before counting, so that no record in between is missed
        while len(self._records) < count:
            if not self._enough.wait(LOOK_SECONDS):
                look()
        return [self._records.popleft() for _ in range(count)]
