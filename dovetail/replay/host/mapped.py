"""Large leaves and frames in a memory-mapped file of a durable table: storing them persists them.

Data written to mapped memory survives the process, like data written to a file, without a second
copy. The log then needs only the rows' check sums. Replaying a log changes no mapped row, since all
of them are already there; it recovers the expected sums, and `wrong` finds the rows that differ.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

SEED = np.uint64(0x9E3779B97F4A7C15)
"""Initial value of sums, so that rows of zeros differ from rows never written."""
AT_ONCE = 1 << 24
"""Bytes that are checked at a time."""


class CheckSums:
    """The check sums of rows in storage order: collected, or given when a log is replayed."""

    def __init__(self) -> None:
        self._noted: list[Array] = []
        self._told: Array | None = None
        self.record = 0
        """Number of the log record being replayed."""

    def note(self, sums: Array) -> None:
        """Adds the sums of rows just stored."""
        self._noted.append(sums)

    def taken(self) -> Array:
        """All sums added since the last call."""
        noted, self._noted = self._noted, []
        return noted[0] if len(noted) == 1 else np.concatenate([NONE, *noted])

    def tell(self, sums: Array | None, record: int = 0) -> None:
        """Replay mode: rows are not stored, and these are their sums. None ends it."""
        self._told, self.record = sums, record

    @property
    def telling(self) -> bool:
        """Whether replay mode is on."""
        return self._told is not None

    def next(self, count: int) -> Array:
        """The sums of the next `count` rows."""
        assert self._told is not None
        found, self._told = self._told[:count], self._told[count:]
        return found


NONE = np.zeros(0, np.uint64)
Guard = Callable[["Mapped", Array], None]


class Mapped:
    """The rows of one leaf in mapped memory, written and read by position like an array."""

    def __init__(self, array: Array, frames: bool, sums: CheckSums, guard: Guard) -> None:
        """`guard` is called with the positions of rows before they are overwritten."""
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.frames = frames
        """Whether the rows are frames."""
        self.nbytes, self._sums, self._guard = array.nbytes, sums, guard
        size = array.nbytes // max(array.shape[0], 1)
        # The widest word that divides a row: fewer words to sum.
        word = next(np.dtype(f"u{n}") for n in (8, 4, 2, 1) if size % n == 0)
        self._words: Array = array.reshape(array.shape[0], -1).view(word)
        self.sums = np.zeros(array.shape[0], np.uint64)
        """Expected check sum of each row; 0 where none was ever stored."""
        self.writers = np.zeros(array.shape[0], np.int64)
        """Number of the log record that wrote each row, when a log is replayed."""
        self._line = np.arange(0)

    def __setitem__(self, places: Array, values: Any) -> None:
        # A log is being replayed: the row is already in the file, only its sum is missing.
        if self._sums.telling:
            self.sums[places] = self._sums.next(places.size)
            self.writers[places] = self._sums.record
            return
        # The journal may have to log the old rows first.
        self._guard(self, places)
        here = self._in_line(places)
        self.array[here] = values
        sums = _sums_of(self._words[here])
        self.sums[here] = sums
        self._sums.note(sums)

    def _in_line(self, places: Array) -> Any:
        """A slice, if the positions are consecutive, which avoids a copy."""
        if self._line.size != places.size:
            self._line = np.arange(places.size)
        if places.size and np.array_equal(places - places[0], self._line):
            return slice(int(places[0]), int(places[0]) + places.size)
        return places

    def take(self, places: Array, axis: int, out: Array, mode: str = "wrap") -> Array:
        """The rows at `places`; positions past the end wrap around."""
        return self.array.take(places, axis=axis, out=out, mode=mode)  # type: ignore[call-overload]

    def __getitem__(self, places: Array) -> Array:
        return self.array[places]

    def loaded(self) -> None:
        """Call after the array was changed from outside."""
        for here in self._pieces():
            self.sums[here] = _sums_of(self._words[here])

    def wrong(self) -> Array:
        """Positions of rows whose check sums do not match."""
        found = [
            here.start + np.flatnonzero((_sums_of(self._words[here]) != sums) & (sums != 0))
            for here in self._pieces()
            if (sums := self.sums[here]).any()
        ]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def _pieces(self) -> list[slice]:
        rows = max(AT_ONCE * self.shape[0] // max(self.nbytes, 1), 1)
        return [slice(at, at + rows) for at in range(0, self.shape[0], rows)]


def _sums_of(words: Array) -> Array:
    # A sum, not a CRC, for speed.
    return np.add.reduce(words, axis=1, dtype=np.uint64, initial=SEED)
