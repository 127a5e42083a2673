"""Rows on the host with their small leaves side by side, so that a row is one copy.

A row's small leaves share one block of words, so a batch of rows is one gather and each leaf a view
of it. Large leaves have separate arrays: there the copy itself dominates.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from dovetail.replay.host.compressed import Compressed, Store
from dovetail.replay.leaves import RowLeaf
from dovetail.replay.table import SMALL
from dovetail.replay.tree import Slots

STAGES = 64
"""Number of insert shapes for which staging buffers are cached."""
WORD = np.dtype(np.uint64)

Block = np.ndarray[Any, np.dtype[Any]]


class Packing:
    """The layout of leaves in a block of words."""

    def __init__(self, leaves: Sequence[RowLeaf]) -> None:
        sizes = [prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves]
        self.packed = [at for at, size in enumerate(sizes) if size <= SMALL]
        self.alone = [at for at, size in enumerate(sizes) if size > SMALL]
        order = sorted(self.packed, key=lambda at: -leaves[at].dtype.itemsize)  # keeps alignment
        offsets: dict[int, int] = {}
        end = 0
        for at in order:
            offsets[at] = end
            end += sizes[at]
        self.words = -(-end // WORD.itemsize)
        self._leaves = list(leaves)
        self._offsets = offsets

    def views(self, block: Block) -> dict[int, Block]:
        """Each packed leaf as a view of a block [..., words], with the leaf's axes last."""
        raw = block.view(np.uint8)
        found: dict[int, Block] = {}
        for at in self.packed:
            leaf, start = self._leaves[at], self._offsets[at]
            size = prod(leaf.shape) * leaf.dtype.itemsize
            part = raw[..., start : start + size]
            if size == 0:
                part = np.zeros((*block.shape[:-1], *leaf.shape), leaf.dtype)
            else:
                part = part.view(leaf.dtype)
                part = np.lib.stride_tricks.as_strided(
                    part,
                    (*block.shape[:-1], *leaf.shape),
                    (*block.strides[:-1], *contiguous_strides(leaf)),
                )
            found[at] = part
        return found


def contiguous_strides(leaf: RowLeaf) -> tuple[int, ...]:
    """The strides of a contiguous leaf."""
    strides: list[int] = []
    step = leaf.dtype.itemsize
    for length in reversed(leaf.shape):
        strides.insert(0, step)
        step *= length
    return tuple(strides)


class PackedRows:
    """Rows with given leaves, written and read by position."""

    def __init__(
        self, leaves: Sequence[RowLeaf], packing: Packing, size: int, compressed: int = 0
    ) -> None:
        """`compressed`: the number of interleaved streams if large leaves are compressed, or 0."""
        self.leaves = list(leaves)
        self.packing = packing
        self.block = np.zeros((size, self.packing.words), WORD)
        self.alone: dict[int, Store] = {}
        for at in self.packing.alone:
            shape, dtype = leaves[at].shape, leaves[at].dtype
            self.alone[at] = (
                Compressed(size, shape, dtype, compressed)
                if compressed
                else np.zeros((size, *shape), dtype)
            )
        self._last = len(self.leaves) - 1
        self._line = np.dtype((np.void, self.packing.words * WORD.itemsize))
        self._lines: Block = self.block.view(self._line).reshape(-1)
        """The block with one element per row: assigning these is much faster."""
        self._staged = (self.block[:0], self._lines[:0])
        self._stages: dict[tuple[int, ...], tuple[Block, list[tuple[int, Block]]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.block.nbytes + sum(store.nbytes for store in self.alone.values())

    def pack(self, arrays: Sequence[Block], shape: tuple[int, int]) -> Block:
        """The small leaves of rows given as [T, B, …], in order of time, valid until the next call;
        the extra flag leaf is zero."""
        known = self._stages.get(shape)
        stage, views = known if known is not None else self._stage(shape)
        for at, view in views:
            if at < self._last:
                view[...] = arrays[at]
        if stage is not self._staged[0]:
            self._staged = (stage, self._as_lines(stage))
        return stage

    def _as_lines(self, block: Block) -> Block:
        return np.ascontiguousarray(block).view(self._line).reshape(-1)

    def store(self, places: Slots, block: Block, alone: Sequence[Block]) -> None:
        """Stores packed rows."""
        stage, lines = self._staged
        self._lines[places] = lines if block is stage else self._as_lines(block)
        if alone:
            for store, array in zip(self.alone.values(), alone, strict=True):
                store[places] = array

    def write(self, places: Slots, arrays: Sequence[Block | None], count: int) -> None:
        """Stores rows given leaf by leaf along one axis; None means zeros."""
        stage, views = self._stage((count,))
        for at, view in views:
            array = arrays[at]
            view[...] = 0 if array is None else array
        self._lines[places] = self._as_lines(stage)
        for at, store in self.alone.items():
            array = arrays[at]
            store[places] = 0 if array is None else array

    def _stage(self, shape: tuple[int, ...]) -> tuple[Block, list[tuple[int, Block]]]:
        """A staging buffer for packing, cached for each shape."""
        known = self._stages.get(shape)
        if known is None:
            # Callers whose shapes keep changing must not fill the memory.
            if len(self._stages) > STAGES:
                self._stages.clear()
            stage = np.zeros((*shape, self.packing.words), WORD)
            views = list(self.packing.views(stage).items())
            known = self._stages[shape] = (stage.reshape(-1, self.packing.words), views)
        return known

    def read(self, places: Slots, block: Block, alone: Mapping[int, Block]) -> None:
        """Copies the rows at positions [W, n]; positions past the end wrap around."""
        self.block.take(places, axis=0, out=block, mode="wrap")
        for at in alone:
            store = self.alone[at]
            for here, out in zip(places, alone[at], strict=True):  # each `out` is contiguous
                store.take(here, axis=0, out=out, mode="wrap")
