"""The memory-mapped file with a durable table's large leaves and frames.

Only rings are stored this way, in which a row is overwritten when its items have left, or nearly
so. Where items own their rows, or rows are compressed, the log has the rows themselves.
"""

import mmap
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dovetail.errors import UserError
from dovetail.replay.host.form import RowForm, place, size_of
from dovetail.replay.host.mapped import CheckSums, Guard, Mapped
from dovetail.replay.host.streams import Streams

Array = np.ndarray[Any, np.dtype[Any]]


def is_mapped(form: RowForm) -> bool:
    """Whether a durable table of that form has mapped rows."""
    table = form.table
    return table.shared and not table.compress and bool(form.packing.alone or form.stacks)


class Damage(NamedTuple):
    """The consequences of damaged rows."""

    floor: Array
    """Number of each stream's first item after all damaged rows."""
    record: int
    """The first log record that wrote one of the newer damaged rows; 0 if none did."""


class RowsFile:
    """The mapped rows of a table's streams, which store them there from now on."""

    def __init__(self, path: Path, streams: Streams, guard: Guard) -> None:
        form, layout = streams.form, streams.layout
        leaves = [form.kept[at] for at in form.packing.alone]
        specs = [((layout.lane, *leaf.shape), leaf.dtype) for leaf in leaves]
        specs += [((layout.frame_lane, *stack.shape), stack.dtype) for stack in form.stacks]
        self._file = _made(path, max(size_of(specs), 1))
        arrays = place(specs, mmap.mmap(self._file, max(size_of(specs), 1)))
        self.sums = CheckSums()
        self.stores = [
            Mapped(array, at >= len(leaves), self.sums, guard) for at, array in enumerate(arrays)
        ]
        streams.rows.alone = dict(zip(form.packing.alone, self.stores, strict=False))
        streams.frames.stores = list(self.stores[len(leaves) :])
        self._streams = streams

    def needed(self, store: Mapped, places: Array, begun: Array) -> bool:
        """Whether items that can be sampled may need rows at `places`; `begun` is the number of
        items each stream has started."""
        layout = self._streams.layout
        first = begun[places % layout.envs] - layout.slots  # older ones have left
        return bool(
            np.count_nonzero((self._last(store, places) >= first) & (store.sums[places] != 0))
        )

    def _last(self, store: Mapped, places: Array) -> Array:
        """Upper bounds on the numbers of the last items that use rows."""
        if not store.frames:
            return self._streams.begun_at[places]
        return self._streams.frame_begun[places] + (self._streams.layout.stack - 1)

    def sync(self) -> None:
        """Waits until the data are on disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Closes the file; its arrays stay mapped."""
        os.close(self._file)

    def damage(self) -> Damage:
        """Finds damaged rows."""
        layout = self._streams.layout
        floor = np.zeros(layout.envs, np.int64)
        record = 0
        for store in self.stores:
            places = store.wrong()
            envs = places % layout.envs
            np.maximum.at(floor, envs, self._last(store, places) + 1)
            counters = self._streams.counters
            cursor = (counters.frame_cursor if store.frames else counters.cursor)[envs]
            lap = layout.frames if store.frames else layout.rows
            newest = (places - cursor) // layout.envs % lap >= lap // 2
            told = [x for x in store.writers[places[newest]].tolist() if x]
            record = min([*told, *([record] if record else [])], default=0)
        return Damage(floor, record)


def _made(path: Path, size: int) -> int:
    """Opens a file of that size, with its disk space allocated up front."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # A missing page would kill the process when the mapped memory is written (SIGBUS).
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        os.close(file)
        raise UserError(
            f"{path} of {size} bytes could not be made ({error.strerror}): make room for the whole "
            "replay table, or give another folder."
        ) from error
    return file
