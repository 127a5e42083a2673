"""Reads a dataset in the learner's own row format, in parts to bound the memory."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dovetail.data.episode import Rows
from dovetail.data.hdf5 import Piece
from dovetail.data.reader import READ_BYTES, Reader


class RowReader:
    """Reads a dataset's rows, converted by `row`."""

    def __init__(self, reader: Reader, row: Callable[[Rows], Any], memory: int) -> None:
        """A read takes at most min(`memory`, `READ_BYTES`) bytes in addition to its result."""
        self._reader, self._row = reader, row
        # One row shows what `row` makes of it.
        seen = reader.pieces([Piece(0, 0, 1)])
        self._example = row(seen)
        self.row_bytes = _bytes(self._example)
        """Bytes of one of the learner's rows."""
        meanwhile = reader.metadata.row_bytes + _bytes(seen) + self.row_bytes
        self._at_once = max(min(memory, READ_BYTES) // meanwhile, 1)

    def read(self, pieces: Sequence[Piece], room: int | None = None) -> Any:
        """The rows of these pieces, concatenated; with `room`, zero-padded to that many."""
        size = sum(piece.stop - piece.start for piece in pieces) if room is None else room
        found = jax.tree.map(lambda x: np.zeros((size, *x.shape[1:]), x.dtype), self._example)
        first = 0
        for group in self._reader.parts(pieces, self._at_once):
            part = self._row(self._reader.pieces(group))
            stop = first + sum(piece.stop - piece.start for piece in group)
            # Copied into one array as it is read: no second copy of all rows exists at any time.
            jax.tree.map(lambda to, x, a=first, b=stop: np.copyto(to[a:b], x), found, part)
            first = stop
        return found


def _bytes(rows: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(rows))
