"""What the learner's worker leaves of every update, and how that comes to who asked for them."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dovetail.runtime.report import UpdatePart

LOOK_SECONDS = 0.25
"""How often who waits looks at whether a worker has failed."""


@dataclass(frozen=True)
class UpdateRecord:
    """One update, as the learner's worker leaves it."""

    metrics: list[Any]
    episodes: list[Any]
    state: list[Any]
    """Empty unless it is the last update that was asked for: what nobody reads makes room."""
    actor: list[list[Any]]
    """Of each copy; empty as well."""
    parts: list[UpdatePart]
    tapped: list[Any]
    """The values of the graph's tap."""


class Records:
    """The records that nobody has taken yet, in their order."""

    def __init__(self) -> None:
        self._records: deque[UpdateRecord] = deque()
        self._wanted = 1
        self._enough = threading.Event()
        """Set when there are as many as are wanted: who takes them is woken once for all."""

    def add(self, record: UpdateRecord) -> None:
        """One more."""
        self._records.append(record)
        if len(self._records) >= self._wanted:
            self._enough.set()

    def take(self, count: int, look: Callable[[], None]) -> list[UpdateRecord]:
        """The first ones; waits for them, and calls `look` meanwhile, which raises if they will not
        come."""
        look()
        self._wanted = count
        self._enough.clear()
        while len(self._records) < count:
            if not self._enough.wait(LOOK_SECONDS):
                look()
        return [self._records.popleft() for _ in range(count)]
