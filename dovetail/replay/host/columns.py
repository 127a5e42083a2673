"""The fields of each item besides its rows, stored next to each other in memory, so that looking up
an item costs one cache miss instead of one per field."""

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
"""Increment of `times`, in its own dtype: `np.add.at` is much faster without a cast."""


class ItemColumns:
    """The fields of `size` items; every column is a view of one structured array. `ranged` items
    need only two of them."""

    def __init__(self, size: int, ranged: bool = False) -> None:
        items: Any = np.zeros(size, ITEM)
        if ranged:
            both = np.zeros(size, RANGED)
            # The unused columns stay empty.
            items = {name: np.zeros(0, ITEM[name]) for name in ITEM.names or ()}
            items["start"], items["times"] = both["start"], both["times"]
        self.start: Array = items["start"]
        """Position of its first row."""
        self.serial: Array = items["serial"]
        """Tells successive items of one slot apart; for ordered selectors, also their age."""
        self.priority: Array = items["priority"]
        self.given: Array = items["given"]
        """Its initial priority."""
        self.times: Array = items["times"]
        """Number of times it has been sampled."""
        self.live: Array = items["live"]
        """Whether it can be sampled."""
