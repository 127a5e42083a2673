"""Buffers that a host table's samples are read into, and the trees of views of them."""

from typing import Any

import jax
import numpy as np

from dovetail.replay.owned import OwnedItems
from dovetail.replay.streams import Streams

Array = np.ndarray[Any, np.dtype[Any]]


class Output:
    """Room for a sample of `count` items."""

    def __init__(
        self, streams: Streams, owned: OwnedItems | None, structure: Any, count: int
    ) -> None:
        layout, cut = streams.layout, streams.table.items.cut
        self._streams, self._owned, self._cut = streams, owned, cut
        self._rows = (owned or streams).rows.buffer((layout.window, count))
        shape = (layout.window + layout.stack - 1,) if cut else (layout.window, layout.stack)
        self._frames = [np.zeros((count, *shape, *s.shape), s.dtype) for s in streams.stacks]
        leaves: list[Any] = [None] * len(streams.leaves)
        *plain, self._final = (np.swapaxes(leaf, 0, 1) for leaf in self._rows.leaves)
        for at, leaf in zip(streams.plain, plain, strict=True):
            leaves[at] = leaf
        for at, stack, frames in zip(streams.stacked, streams.stacks, self._frames, strict=True):
            leaves[at] = stack.shared(frames) if cut else stack.whole(frames)
        self.tree = jax.tree.unflatten(structure, leaves)
        self.mask = np.zeros((count, layout.window), bool)
        self.mask[:, 0] = True
        self.alike = np.zeros(count, np.float32)
        """The probabilities of items that are all alike."""

    def read(self, slots: Array) -> None:
        """Copies the windows of items."""
        owned, streams = self._owned, self._streams
        places = streams.windows(slots) if owned is None else owned.windows(slots)
        self._rows.read(places)
        if self._frames:
            at = streams.frame_places(places) if owned is None else owned.frame_places(slots)
            stores = (owned or streams).frames.stores
            for buffer, store in zip(self._frames, stores, strict=True):
                store.take(at, axis=0, out=buffer, mode="wrap")
        if not self._cut:
            np.equal(self._final, 0, out=self.mask)
        elif self.mask.shape[1] > 2:
            passed = np.logical_or.accumulate(self._final[:, :-1], axis=1)
            np.logical_not(passed, out=self.mask[:, :-1])
