"""How the rows of a table lie in memory: what follows from its options and its rows alone.

A host table and the clients of one that is kept elsewhere work it out alike, so that what one
writes into memory that they share the other finds.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from dovetail.replay.host.frames import Stack
from dovetail.replay.host.packed import Packing
from dovetail.replay.leaves import RowLeaf, check_history
from dovetail.replay.table import Table, make_layout

Array = np.ndarray[Any, np.dtype[Any]]
Spec = tuple[tuple[int, ...], np.dtype[Any]]
"""The shape and type of an array."""

FLAG = RowLeaf("", (), np.dtype(np.uint8))
"""Kept with every row: whether it shows only what an episode ended with."""
LINE = 64
"""Bytes of a cache line: every array in shared memory begins at one."""


class RowForm:
    """The leaves of a table's rows, which of them are stacks of frames, and how all are kept."""

    def __init__(self, table: Table, leaves: Sequence[RowLeaf], num_envs: int) -> None:
        check_history(leaves, table.history)
        self.table, self.leaves = table, list(leaves)
        self.layout = make_layout(table, leaves, num_envs, on_host=True)
        histories = {history.path: history for history in table.history}
        self.plain = [at for at, leaf in enumerate(leaves) if leaf.path not in histories]
        self.stacked = [at for at, leaf in enumerate(leaves) if leaf.path in histories]
        self.stacks = [Stack(leaves[at], histories[leaves[at].path]) for at in self.stacked]
        self.kept = [*(leaves[at] for at in self.plain), FLAG]
        self.packing = Packing(self.kept)


def size_of(specs: Sequence[Spec]) -> int:
    """Bytes of arrays that are placed one behind the other."""
    return sum(_room(prod(shape) * dtype.itemsize) for shape, dtype in specs)


def place(specs: Sequence[Spec], buffer: Any = None, at: int = 0) -> list[Array]:
    """Arrays one behind the other from a place of a buffer on; without one, in their own memory."""
    if buffer is None:
        return [np.zeros(shape, dtype) for shape, dtype in specs]
    found: list[Array] = []
    for shape, dtype in specs:
        found.append(np.ndarray(shape, dtype, buffer, at))
        at += _room(prod(shape) * dtype.itemsize)
    return found


def _room(size: int) -> int:
    return -(-size // LINE) * LINE
