"""Large leaves and frames compressed row by row (zlib, level 1), and their memory budget.

A table with compressed rows cannot know in advance how many will fit into its budget. It measures
them as they arrive, and drops the oldest items of a stream that exceeds its equal share.
"""

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.replay.host.mapped import Mapped

if TYPE_CHECKING:
    from dovetail.replay.host.streams import Streams

Array = np.ndarray[Any, np.dtype[Any]]
LEVEL = 1


class Compressed:
    """`size` rows of one leaf, written and read by position like an array; the rows of `envs`
    streams are interleaved."""

    def __init__(self, size: int, shape: tuple[int, ...], dtype: Any, envs: int = 1) -> None:
        self.shape, self.dtype = (size, *shape), np.dtype(dtype)
        self._rows: list[bytes] = [b""] * size
        self._envs = envs
        self.taken = np.zeros(envs, np.int64)
        """Bytes of each stream."""

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return int(self.taken.sum())

    def __setitem__(self, places: Array, values: Any) -> None:
        shape = self.shape[1:]
        rows = np.broadcast_to(np.asarray(values, self.dtype), (*places.shape, *shape))
        for place, row in zip(places.ravel().tolist(), rows.reshape(-1, *shape), strict=True):
            self._put(place, zlib.compress(np.ascontiguousarray(row).data, LEVEL))

    def __getitem__(self, places: Array) -> Array:
        return self.take(places, 0, np.empty((*places.shape, *self.shape[1:]), self.dtype))

    def take(self, places: Array, axis: int, out: Array, mode: str = "wrap") -> Array:
        """The rows at `places`; positions past the end wrap around."""
        for at, place in np.ndenumerate(places % self.shape[0]):
            row = self._rows[place]
            raw = zlib.decompress(row) if row else b""
            out[at] = np.frombuffer(raw, self.dtype).reshape(self.shape[1:]) if raw else 0
        return out

    def forget(self, places: Sequence[int]) -> None:
        """Frees rows that will not be read again."""
        for place in places:
            self._put(place, b"")

    def _put(self, place: int, row: bytes) -> None:
        self.taken[place % self._envs] += len(row) - len(self._rows[place])
        self._rows[place] = row

    def save(self) -> tuple[Array, Array]:
        """(length of each row, the concatenated bytes)."""
        lengths = np.array([len(row) for row in self._rows], np.int64)
        return lengths, np.frombuffer(b"".join(self._rows), np.uint8)

    def load(self, lengths: Array, data: Array) -> None:
        """Restores what `save` returned."""
        ends = np.cumsum(lengths).tolist()
        raw = data.tobytes()
        self._rows = [raw[end - n : end] for n, end in zip(lengths.tolist(), ends, strict=True)]
        for env in range(self._envs):
            self.taken[env] = lengths[env :: self._envs].sum()


Store = Array | Compressed | Mapped
"""Holds the rows of a large leaf, or frames."""


class Budget:
    """Keeps the compressed rows and frames of streams within a number of bytes."""

    def __init__(self, streams: "Streams", share: int) -> None:
        self._streams, self._share = streams, share
        envs = streams.layout.envs
        self.floor = np.zeros(envs, np.int64)
        """Number of each stream's oldest item that has not been dropped."""
        self.written = np.zeros((2, envs), np.int64)
        """Number of rows and frames ever stored."""
        self.kept = np.zeros((2, envs), np.int64)
        """Number of the oldest row and frame still stored."""
        self._cursors = np.stack([streams.counters.cursor, streams.counters.frame_cursor])

    def enforce(self, first: int, last: int) -> None:
        """Drops the oldest items of streams `first` … `last` - 1 until each is within its share."""
        streams, layout = self._streams, self._streams.layout
        now = np.stack([streams.counters.cursor, streams.counters.frame_cursor])
        laps = np.array([[layout.rows], [max(layout.frames, 1)]])
        self.written += (now - self._cursors) // layout.envs % laps
        self._cursors = now
        np.maximum(self.kept, self.written - laps, out=self.kept)
        stores = self._stores()
        low, high = streams.bounds()
        for env in range(first, last):
            item = int(low[env])
            while item < high[env] and sum(store.taken[env] for store, _ in stores) > self._share:
                item += 1
                self.floor[env] = item
                self._release(env, item)

    def _stores(self) -> list[tuple[Compressed, int]]:
        """The compressed stores, tagged 0 for rows and 1 for frames."""
        streams = self._streams
        rows = [(s, 0) for s in streams.rows.alone.values() if isinstance(s, Compressed)]
        return rows + [(s, 1) for s in streams.frames.stores if isinstance(s, Compressed)]

    def _release(self, env: int, item: int) -> None:
        """Frees a stream's rows and frames that only items before `item` need."""
        streams, layout = self._streams, self._streams.layout
        if item >= streams.counters.begun[env]:
            return
        start = int(streams.starts[item % layout.slots * layout.envs + env])
        needed = [start, 0]
        if layout.frames:
            needed[1] = int(streams.frame_at[start]) - (layout.stack - 1) * layout.envs
        for kind, lap in enumerate((layout.rows, layout.frames)):
            if not lap:
                continue
            # A distance of 0 means a whole lap.
            back = (int(self._cursors[kind, env]) - needed[kind]) // layout.envs % lap or lap
            until = int(self.written[kind, env]) - back
            for store, stored in self._stores():
                if stored == kind:
                    numbers = range(int(self.kept[kind, env]), until)
                    store.forget([number % lap * layout.envs + env for number in numbers])
            self.kept[kind, env] = max(until, int(self.kept[kind, env]))

    def loaded(self) -> None:
        """Call after the streams were changed from outside."""
        counters = self._streams.counters
        self._cursors = np.stack([counters.cursor, counters.frame_cursor])
