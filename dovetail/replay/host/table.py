"""A replay table on the host: numpy arrays, updated in place.

An insert writes rows and counters; which items are complete and which have left is computed lazily,
when the table is sampled. Samples are views of a few buffers used in rotation: a sample is valid
until `buffers` further samples of its size have been taken. Not thread-safe: see `ReplayService`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dovetail.errors import UserError
from dovetail.replay.host.columns import ONCE, ItemColumns
from dovetail.replay.host.form import RowForm
from dovetail.replay.host.incoming import Incoming, IncomingSteps, Plain, highest_of
from dovetail.replay.host.index import HostIndex
from dovetail.replay.host.output import Output
from dovetail.replay.host.owned import OwnedItems
from dovetail.replay.host.streams import Streams
from dovetail.replay.leaves import RowLeaf, leaves_of, structure_of
from dovetail.replay.sample import ItemKeys, Sample
from dovetail.replay.table import Episodes, Prioritized, Sequences, Table, Uniform

Array = np.ndarray[Any, np.dtype[Any]]


EXACT = 1 << 24
"""float32 represents all integers up to this one exactly."""


class HostTable:
    """A table for rows like `example` (one row, or its shapes) of `num_envs` environments."""

    def __init__(
        self,
        table: Table,
        example: Any,
        num_envs: int,
        buffers: int = 2,
        leaves: Sequence[RowLeaf] | None = None,
    ) -> None:
        """With `leaves` instead of an example, rows are lists of leaves."""
        self.table = table
        self.form = RowForm(table, leaves_of(example) if leaves is None else leaves, num_envs)
        self.leaves, self.layout = self.form.leaves, self.form.layout
        self.structure = None if leaves is not None else structure_of(example)
        self.incoming = Incoming(self.leaves, self.structure, num_envs)
        self._chunk = self.layout.chunk
        self._most = self.layout.owned or self.layout.share * self.layout.envs
        self.streams = Streams(self.form)
        self.index = None
        if not table.ranged:
            items = ItemColumns(self.layout.owned) if self.layout.owned else self.streams.items
            self.index = HostIndex(table, items)
        self.owned = OwnedItems(self.streams) if self.layout.owned else None
        self.highest = 1.0
        self.low = np.zeros(num_envs, np.int64)
        self.high = np.zeros(num_envs, np.int64)
        self._settled = False
        self._offsets = self._totals = self.low
        self._equal = 0  # number of items per stream, if all streams have equally many
        self._count_of_all = 0  # number of items when last settled, without an index
        self._scale: Any = 0  # the same, in the dtype that multiplies draws fastest
        self._in_order = not isinstance(table.sampler, Uniform | Prioritized)
        self._buffers = buffers
        self._outputs: dict[int, list[Output]] = {}

    @property
    def size(self) -> int:
        """Number of items that can be sampled; settles the table first."""
        self.settle()
        return self.index.count if self.index is not None else self._count_of_all

    @property
    def completed(self) -> int:
        """Number of items ever completed."""
        return self.streams.completed()

    def items_of(self, steps: int) -> int:
        """Approximate number of items that `steps` steps make."""
        items = self.table.items
        per_item = items.period if isinstance(items, Sequences) else 1
        return steps // (items.longest if isinstance(items, Episodes) else per_item)

    def check_batch(self, count: int) -> None:
        """Raises if a sample has more items than the table can hold."""
        if not 1 <= count <= self._most:
            raise UserError(
                f"A sample of {count} items was asked of a replay table that holds {self._most}: "
                "give it a larger capacity, or sample fewer."
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the stored rows and frames."""
        kept = [self.streams, *([] if self.owned is None else [self.owned])]
        return sum(part.rows.nbytes + part.frames.nbytes for part in kept)

    def insert(
        self,
        rows: Any,
        ends: Array | None = None,
        valid: Array | None = None,
        final: Any = None,
        priorities: Array | None = None,
        envs: tuple[int, int] | None = None,
        broken: Array | None = None,
    ) -> None:
        """Appends rows [T, B, …] to the streams of environments `envs` (from, to); all by default.

        `ends` [T, B] marks the last steps of episodes; `final`, part of the row's structure with
        leaves [T, B, …], then holds the successor. Steps that are not `valid` are skipped.
        `priorities` [T, B] are those of the items that start there; by default, the highest so far.
        `broken` [B]: an episode starts with the first step although the last one did not end.
        """
        self.insert_steps(*self.incoming.steps(rows, ends, valid, final, priorities, envs, broken))

    def insert_steps(self, steps: IncomingSteps, first: int, last: int) -> None:
        """Appends checked steps to streams `first` … `last` - 1."""
        if steps.priorities is not None:
            self.highest = max(self.highest, highest_of(steps.priorities))
        if steps.broken is not None:
            self.streams.break_off(steps.broken, first)
        length = steps.leaves[0].shape[0]
        if length <= self._chunk:
            self._insert(steps, first, last)
        else:
            for start in range(0, length, self._chunk):
                self._insert(steps.part(start, start + self._chunk), first, last)
            self.streams.written = None  # it would describe the last piece only

    def insert_plain(self, plain: Plain, first: int, last: int) -> None:
        """Appends steps in storage format; at most `TableSizes.chunk`."""
        if self.form.stacks and self.streams.begins(first, last):
            raise UserError(
                f"Steps within episodes were inserted for environments {first} to {last}, of which "
                "some begin one: let one client insert all steps of an environment."
            )
        if plain.priorities is not None:
            self.highest = max(self.highest, highest_of(plain.priorities))
        self.streams.insert_plain(plain, first, last, self.highest)
        if self.streams.budget is not None:
            self.streams.budget.enforce(first, last)
        self._inserted()

    def _insert(self, steps: IncomingSteps, first: int, last: int) -> None:
        self.streams.insert(steps, first, last, self.highest)
        self._inserted()

    def _inserted(self) -> None:
        self._settled = False
        # Ordered selectors need the order of completion; owned items must be copied out before
        # their rows are overwritten.
        if self._in_order or self.owned is not None:
            self.settle()

    def settle(self) -> None:
        """Determines which items are complete and which have left, after the inserts so far."""
        if self._settled:
            return
        self._settled = True
        low, high = self.streams.bounds()
        if self.index is None:
            counts = high - low
            self._totals = np.cumsum(counts)
            self._count_of_all = count = int(self._totals[-1])
            self._scale = np.float32(count) if count <= EXACT else count
            # Added to a rank, it gives the number of the item within its stream.
            self._offsets = low - (self._totals - counts)
            self._equal = int(counts[0]) if counts.min() == counts.max() else 0
        elif self.owned is not None:
            self.owned.take(self.streams.span(self.high, high)[0], self.index)
        else:
            self.index.drop(self.streams.span(self.low, np.minimum(low, self.high))[0])
            new, numbers = self.streams.span(np.maximum(self.high, low), high)
            self.index.add(new, self.streams.given[new], None if self._in_order else numbers)
        # Items from `low` to `high` - 1 of each stream can be sampled.
        self.low, self.high = low, high

    def unsettle(self) -> None:
        """Call after the streams were changed from outside."""
        self._settled = False
        self.streams.broken = True  # the rows that came may belong to episodes that were broken off

    def sample(self, draws: Array, output: Output | None = None) -> Sample:
        """Items for draws [n] from [0, 1): the same draws choose the same items.

        They are read into one of the table's own buffers unless an `output` is given.
        """
        sampled = draws.size
        count = self._countable(sampled)
        output = self._output(sampled) if output is None else output
        if self.index is None:
            slots, numbers = self._choose(draws, count)
            probabilities = output.alike
            probabilities.fill(1 / count)
            times_of_all = self.streams.times
            times = times_of_all[slots]
            # `add.at` counts an item that was drawn twice twice; `+=` would count it once.
            np.add.at(times_of_all, slots, ONCE)
            self._read(slots, output)
        else:
            slots, probabilities = self.index.choose(draws)
            numbers = self.index.serial[slots]
            self._read(slots, output)
            times = self._count(slots)
        keys = ItemKeys(slots, numbers)
        return Sample(output.tree, output.mask, keys, probabilities, np.int32(count), times)

    def _countable(self, sampled: int) -> int:
        """Number of items to choose a batch from; raises if there are none."""
        if not 0 < sampled <= self._most:
            self.check_batch(sampled)
        if not self._settled:
            self.settle()
        count = self._count_of_all if self.index is None else self.index.count
        if count == 0:
            raise UserError(
                "The replay table is empty, so nothing can be sampled: insert until an item is "
                "complete."
            )
        return count

    def count_sample(self, draws: Array) -> None:
        """Updates the table as `sample` does, without reading any rows."""
        count = self._countable(draws.size)
        if self.index is None:
            np.add.at(self.streams.times, self._choose(draws, count)[0], ONCE)
        else:
            self._count(self.index.choose(draws)[0])

    def _count(self, slots: Array) -> Array:
        """Counts a sample of indexed items; returns the counts before."""
        assert self.index is not None
        times = self.index.sampled(slots)
        if self.owned is not None:
            self.owned.release(np.unique(slots[~self.index.live[slots]]))
        return times

    def _choose(self, draws: Array, count: int) -> tuple[Array, Array]:
        """Slots and numbers of uniformly chosen items, ranked by stream, then by age."""
        ranks = (draws * self._scale).astype(np.int64)
        if count > EXACT:  # below that, a float32 product never rounds up to the count
            np.minimum(ranks, count - 1, out=ranks)
        # A division instead of a binary search.
        if self._equal:
            streams = ranks // self._equal
        else:
            streams = self._totals.searchsorted(ranks, side="right")
        numbers = ranks + self._offsets.take(streams)
        layout = self.layout
        slots = numbers % layout.slots
        slots *= layout.envs
        slots += streams
        return slots, numbers

    def _read(self, slots: Array, output: Output) -> None:
        """Copies the windows of items."""
        owned, streams = self.owned, self.streams
        kept = owned or streams
        places = kept.windows(slots, output.places)
        kept.rows.read(places, output.block, output.alone)
        if output.frames:
            at = streams.frame_places(places) if owned is None else owned.frame_places(slots)
            for buffer, store in zip(output.frames, kept.frames.stores, strict=True):
                store.take(at, axis=0, out=buffer, mode="wrap")
        if output.masked or streams.broken:
            output.finish()

    def _output(self, count: int) -> Output:
        """The next buffer for samples of `count` items."""
        outputs = self._outputs.get(count)
        if outputs is None:
            outputs = self._outputs[count] = []
        if len(outputs) < self._buffers:
            outputs.append(Output(self.form, self.structure, count))
        else:
            # Reuse the oldest buffer.
            outputs.append(outputs.pop(0))
        return outputs[-1]

    def update_priorities(self, keys: ItemKeys, priorities: Array) -> None:
        """Sets the priorities [n] of items; items that have left are ignored.

        Raises `UserError` if a priority is negative or not finite.
        """
        priorities = np.asarray(priorities)
        self.highest = max(self.highest, highest_of(priorities))
        if self.index is None:
            return
        self.settle()
        slots = np.asarray(keys.slot)
        # A slot may have been reused since: update only the same item.
        there = self.index.live[slots] & (self.index.serial[slots] == keys.number)
        if np.count_nonzero(there) < slots.size:
            slots, priorities = slots[there], priorities[there]
        self.index.update(slots, priorities)
