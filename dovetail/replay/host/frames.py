"""Frame stacks, stored frame by frame: consecutive rows' stacks differ in one frame only.

The ring of frames has the newest frame of every row, and before the first row of an episode the
older frames of its stack, so that every stack is restored exactly, however it was padded.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dovetail.replay.host.compressed import Compressed, Store
from dovetail.replay.leaves import RowLeaf
from dovetail.replay.table import History
from dovetail.replay.tree import Slots

Array = np.ndarray[Any, np.dtype[Any]]


class Stack:
    """Splits one leaf into frames and reassembles it."""

    def __init__(self, leaf: RowLeaf, history: History) -> None:
        self.count = history.frames
        self.axis = history.axis % len(leaf.shape)
        self.shape = leaf.shape[: self.axis] + leaf.shape[self.axis + 1 :]
        self.dtype = leaf.dtype

    def frame(self, stacks: Any, number: int) -> Any:
        """Frame `number` of each stack [m, …]; numpy or JAX."""
        return stacks[(slice(None),) * (self.axis + 1) + (number,)]

    def shared(self, frames: Array) -> Array:
        """The stacks of consecutive rows [n, W, …] as a view of their frames [n, W + k - 1, …]."""
        rows = frames.shape[1] - self.count + 1
        batch, step, *inner = frames.strides
        # Consecutive stacks overlap, so the stack axis repeats the stride of the time axis.
        view = np.lib.stride_tricks.as_strided(
            frames, (frames.shape[0], rows, self.count, *self.shape), (batch, step, step, *inner)
        )
        return np.moveaxis(view, 2, 2 + self.axis)

    def whole(self, frames: Any) -> Any:
        """The stacks [n, W, …] of frames [n, W, k, …]: a view."""
        axes = [0, 1, *range(3, 3 + len(self.shape))]
        axes.insert(2 + self.axis, 2)
        return frames.transpose(axes)


class HostFrames:
    """The frames of every leaf with a history, in flat rings."""

    def __init__(self, stacks: Sequence[Stack], size: int, compressed: int = 0) -> None:
        """`compressed`: the number of interleaved streams if frames are compressed, or 0."""
        self.stacks = list(stacks)
        self.stores: list[Store] = [
            Compressed(size, stack.shape, stack.dtype, compressed)
            if compressed
            else np.zeros((size, *stack.shape), stack.dtype)
            for stack in stacks
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return sum(store.nbytes for store in self.stores)

    def write(self, places: Slots, arrays: Sequence[Array | None], number: int) -> None:
        """Stores frame `number` of each stack [m, …]; None means zeros."""
        for stack, store, array in zip(self.stacks, self.stores, arrays, strict=True):
            store[places] = 0 if array is None else stack.frame(array, number)
