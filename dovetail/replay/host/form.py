"""The memory layout of a table's rows, derived from its options and rows alone.

A host table and the clients of a remote one derive it independently, so both ends of a shared
memory agree on it.
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
"""The shape and dtype of an array."""

FLAG = RowLeaf("", (), np.dtype(np.uint8))
"""Stored with every row: whether it is only the final observation of an episode."""
LINE = 64
"""Bytes of a cache line: every array in shared memory is aligned to one."""


class RowForm:
    """The leaves of a table's rows, which of them are frame stacks, and how they are stored."""

    def __init__(self, table: Table, leaves: Sequence[RowLeaf], num_envs: int) -> None:
        check_history(leaves, table.history)
        self.table, self.leaves = table, list(leaves)
        self.layout = make_layout(table, leaves, num_envs, on_host=True)
        histories = {history.path: history for history in table.history}
        self.plain = [at for at, leaf in enumerate(leaves) if leaf.path not in histories]
        self.stacked = [at for at, leaf in enumerate(leaves) if leaf.path in histories]
        self.stacks = [Stack(leaves[at], histories[leaves[at].path]) for at in self.stacked]
        # The flag is stored like one more leaf, after all others.
        self.kept = [*(leaves[at] for at in self.plain), FLAG]
        self.packing = Packing(self.kept)


def size_of(specs: Sequence[Spec]) -> int:
    """Total bytes of arrays placed one after another."""
    return sum(_room(prod(shape) * dtype.itemsize) for shape, dtype in specs)


def place(specs: Sequence[Spec], buffer: Any = None, at: int = 0) -> list[Array]:
    """Arrays one after another in a buffer, starting at `at`; without a buffer, in new memory."""
    if buffer is None:
        return [np.zeros(shape, dtype) for shape, dtype in specs]
    found: list[Array] = []
    for shape, dtype in specs:
        found.append(np.ndarray(shape, dtype, buffer, at))
        at += _room(prod(shape) * dtype.itemsize)
    return found


def _room(size: int) -> int:
    return -(-size // LINE) * LINE
