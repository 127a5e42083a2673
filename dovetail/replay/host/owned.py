"""Items that own their rows, for removers that drop items out of order."""

from typing import Any

import numpy as np

from dovetail.replay.host.compressed import Compressed
from dovetail.replay.host.frames import HostFrames
from dovetail.replay.host.index import HostIndex
from dovetail.replay.host.packed import PackedRows
from dovetail.replay.host.streams import Streams
from dovetail.replay.table import owned_frames

Array = np.ndarray[Any, np.dtype[Any]]


class OwnedItems:
    """Slots with the rows and frames of one item each."""

    def __init__(self, streams: Streams) -> None:
        layout = streams.layout
        self.streams = streams
        form = streams.form
        compressed = int(streams.table.compress)
        self.rows = PackedRows(form.kept, form.packing, layout.owned * layout.window, compressed)
        self._width = owned_frames(streams.table, layout)
        self.frames = HostFrames(streams.stacks, layout.owned * self._width, compressed)
        limit = streams.table.max_bytes
        self._limit = limit if compressed else None
        self.free = np.arange(layout.owned)[::-1].copy()
        """Slots without an item; the last one is used next."""
        self.num_free = layout.owned

    def take(self, items: Array, index: HostIndex) -> None:
        """Copies complete items out of the streams, one by one; the remover makes room."""
        for item in items:
            if not self.num_free:
                self._make_room(index)
            self.num_free -= 1
            # A copy: `release` overwrites this part of the stack.
            slot = self.free[self.num_free : self.num_free + 1].copy()
            # One by one, because each may need the room that the one before it has freed.
            self._copy(self.streams.windows(np.array([item])), slot)
            index.add(slot, self.streams.given[item : item + 1])
            # Only the compressed size is limited, which is known after the copy.
            while self._limit is not None and self.nbytes > self._limit and index.count > 1:
                self._make_room(index)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and frames, including those of the streams."""
        own = self.rows.nbytes + self.frames.nbytes
        return own + self.streams.rows.nbytes + self.streams.frames.nbytes

    def _make_room(self, index: HostIndex) -> None:
        victim = np.array([index.victim()])
        index.drop(victim)
        self.release(victim)

    def release(self, slots: Array) -> None:
        """Frees the slots of items that have left."""
        self.free[self.num_free : self.num_free + slots.size] = slots
        self.num_free += slots.size
        if self.streams.table.compress:
            self._forget(slots)

    def _forget(self, slots: Array) -> None:
        """Frees compressed rows and frames."""
        for store in self.rows.alone.values():
            if isinstance(store, Compressed):
                store.forget(self.windows(slots).ravel().tolist())
        for store in self.frames.stores:
            if isinstance(store, Compressed):
                store.forget(self.frame_places(slots).ravel().tolist())

    def _copy(self, places: Array, slot: Array) -> None:
        """Copies one window, at `places` [W, 1] of the streams, into a slot."""
        layout, source = self.streams.layout, self.streams.rows
        target, places = self.windows(slot)[:, 0], places[:, 0] % layout.lane
        self.rows.block[target] = source.block[places]
        for at, store in self.rows.alone.items():
            store[target] = source.alone[at][places]
        if layout.frames:
            frames = self.streams.frame_places(places[:, None])[0] % layout.frame_lane
            target = self.frame_places(slot)[0]
            for to, store in zip(self.frames.stores, self.streams.frames.stores, strict=True):
                to[target] = store[frames]

    def windows(self, slots: Array, out: Array | None = None) -> Array:
        """Positions of the items' rows [W, n]."""
        window = self.streams.layout.window
        return np.add(slots * window, np.arange(window)[:, None], out=out)

    def frame_places(self, slots: Array) -> Array:
        """Positions of the items' frames: [n, W + k - 1], or [n, W, k] across episodes."""
        layout, cut = self.streams.layout, self.streams.table.items.cut
        shape = (self._width,) if cut else (layout.window, layout.stack)
        return (slots[:, None] * self._width + np.arange(self._width)).reshape(-1, *shape)
