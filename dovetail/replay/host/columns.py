"""What is kept of each item beside its rows, side by side: to look at an item is to wait for its
place in memory once, not for each of its numbers."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

ITEM = np.dtype(
    [
        ("start", np.int64),
        ("serial", np.int64),
        ("priority", np.float32),
        ("given", np.float32),
        ("times", np.int32),
        ("live", bool),
        ("unused", np.uint8, 3),
    ]
)
RANGED = np.dtype([("start", np.int32), ("times", np.int32)])
ONCE = np.int32(1)
"""What is added to `times`: of its own type, which is much faster."""


class ItemColumns:
    """The numbers of `size` items; every column is a view of one array. Of `ranged` items only
    two are needed."""

    def __init__(self, size: int, ranged: bool = False) -> None:
        items: Any = np.zeros(size, ITEM)
        if ranged:
            both = np.zeros(size, RANGED)
            items = {name: np.zeros(0, ITEM[name]) for name in ITEM.names or ()}
            items["start"], items["times"] = both["start"], both["times"]
        self.start: Array = items["start"]
        """Where its first row is."""
        self.serial: Array = items["serial"]
        """Tells the items of one slot apart, and, where they are taken in order, their age."""
        self.priority: Array = items["priority"]
        self.given: Array = items["given"]
        """The priority that it began with."""
        self.times: Array = items["times"]
        """How often it has been sampled."""
        self.live: Array = items["live"]
        """Whether it can be sampled."""
