"""A replay table on the host: numpy arrays, changed in place.

An insert writes rows and counts; what follows from the counts (which items are complete, which have
left) is worked out when somebody samples. Samples are views of a few buffers that are used in turn:
one is valid until `buffers` further samples of its size have been taken.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dovetail.errors import UserError
from dovetail.replay.frames import HostFrames, Stack
from dovetail.replay.host_index import HostIndex
from dovetail.replay.leaves import (
    Leaf,
    check_history,
    check_leaves,
    final_positions,
    leaves_of,
)
from dovetail.replay.packed import PackedRows, Rows
from dovetail.replay.sample import Keys, Sample
from dovetail.replay.table import (
    Episodes,
    Prioritised,
    Sequences,
    Table,
    Transitions,
    Uniform,
    make_layout,
    owned_frames,
)
from dovetail.replay.windows import DROP, Counters, complete, make_plan, oldest

Array = np.ndarray[Any, np.dtype[Any]]
Chunk = tuple[list[Array], Array | None, Array | None, "list[Array | None] | None", Array | None]
"""Leaves, ends, valid, final and priorities of some steps."""

FLAG = Leaf("", (), np.dtype(np.uint8))
"""Kept with every row: whether it shows only what an episode ended with."""


class HostTable:
    """A table for rows like `example` (one row, or its shapes) of `num_envs` environments."""

    def __init__(self, table: Table, example: Any, num_envs: int, buffers: int = 2) -> None:
        self.table = table
        self.leaves = leaves_of(example)
        check_history(self.leaves, table.history)
        self.layout = make_layout(table, self.leaves, num_envs)
        self.structure = jax.tree.structure(example)
        self._final_structure: tuple[Any, list[int]] | None = None
        self._buffers = buffers
        self._outputs: dict[int, list[_Output]] = {}
        histories = {history.path: history for history in table.history}
        self.plain = [at for at, leaf in enumerate(self.leaves) if leaf.path not in histories]
        self.stacked = [at for at, leaf in enumerate(self.leaves) if leaf.path in histories]
        self.stacks = [
            Stack(self.leaves[at], histories[self.leaves[at].path]) for at in self.stacked
        ]
        self._allocate()

    def _allocate(self) -> None:
        layout, envs = self.layout, self.layout.envs
        plain = [*(self.leaves[at] for at in self.plain), FLAG]
        self.rows = PackedRows(plain, layout.lane)
        self.frames = HostFrames(self.stacks, layout.frame_lane)
        self.begun_at = np.zeros(layout.lane, np.int64)
        self.frame_at = np.zeros(layout.lane if self.stacks else 0, np.int64)
        self.frame_begun = np.zeros(layout.frame_lane, np.int64)
        self._streams = np.arange(envs)
        self._heads = np.stack([self._streams] * 2)  # where the next row and the next item go
        self._laps = np.array([[layout.lane], [layout.slots * envs]])
        zeros = [np.zeros(envs, np.int64) for _ in range(3)]
        self.counters = Counters(self._heads[0], self._streams.copy(), *zeros, np.ones(envs, bool))
        self.items = np.zeros((layout.slots * envs, 2), np.int64)
        """Of each item, where its first row is, and how often it has been sampled."""
        self._ahead = np.arange(layout.chunk)[:, None] * envs
        self.highest = 1.0
        self.high = np.zeros(envs, np.int64)
        self.low = np.zeros(envs, np.int64)
        self._settled = True
        self._offsets = np.zeros(envs, np.int64)
        self._totals = np.zeros(envs, np.int64)
        self.given = np.zeros(0 if self.table.ranged else layout.slots * envs, np.float32)
        self.index = None if self.table.ranged else HostIndex(self.table, layout.size)
        if layout.owned:
            count = owned_frames(self.table, layout)
            self.own_rows = PackedRows(plain, layout.owned * layout.window)
            self.own_frames = HostFrames(self.stacks, layout.owned * count)
            self._free = list(range(layout.owned))[::-1]
        self._eager = bool(layout.owned) or not isinstance(
            self.table.sampler, Uniform | Prioritised
        )

    @property
    def size(self) -> int:
        """Items that can be sampled."""
        self._settle()
        return self.index.count if self.index is not None else int(self._totals[-1])

    @property
    def completed(self) -> int:
        """Items that have ever been complete."""
        self._settle()
        return int(self.high.sum())

    def items_of(self, steps: int) -> int:
        """About how many items so many steps make."""
        items = self.table.items
        per_item = items.period if isinstance(items, Sequences) else 1
        return steps // (items.longest if isinstance(items, Episodes) else per_item)

    def check_batch(self, count: int) -> None:
        """Refuses samples of more items than the table can hold."""
        most = self.layout.owned or self.layout.share * self.layout.envs
        if not 1 <= count <= most:
            raise UserError(
                f"A sample of {count} items was asked of a replay table that holds {most}: "
                "give it a larger capacity, or sample fewer."
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the stored rows and frames."""
        blocks = [self.rows, *([self.own_rows] if self.layout.owned else [])]
        frames = [self.frames, *([self.own_frames] if self.layout.owned else [])]
        return sum(
            block.block.nbytes + sum(x.nbytes for x in block.alone.values()) for block in blocks
        ) + sum(store.nbytes for part in frames for store in part.stores)

    def insert(
        self,
        rows: Any,
        ends: Array | None = None,
        valid: Array | None = None,
        final: Any = None,
        priorities: Array | None = None,
        envs: tuple[int, int] | None = None,
    ) -> None:
        """Appends rows [T, B, …] to the streams of environments `envs` (from, to); all by default.

        `ends` [T, B]: the episode ends with that step; `final`, a part of the row's structure with
        leaves [T, B, …], then says what was seen after it. Steps that are not `valid` are skipped.
        `priorities` [T, B] are those of the items that begin there; the highest so far by default.
        """
        first, last = (0, self.layout.envs) if envs is None else envs
        leaves, structure = jax.tree.flatten(rows)
        length = self._check(rows, leaves, structure, first, last)
        shape = (length, last - first)
        finals = None if final is None else self._final_leaves(final, shape)
        for name, array in (("ends", ends), ("valid", valid), ("priorities", priorities)):
            if array is not None and array.shape != shape:
                raise UserError(
                    f"What was inserted as {name} has shape {list(array.shape)}, but the rows are "
                    f"{list(shape)} steps of environments: give one for each."
                )
        if priorities is not None:
            self._note_priorities(priorities)
        chunk = self.layout.chunk
        if length <= chunk:
            self._insert((leaves, ends, valid, finals, priorities), first, last)
            return
        for start in range(0, length, chunk):
            part = slice(start, start + chunk)
            self._insert(
                (
                    [x[part] for x in leaves],
                    None if ends is None else ends[part],
                    None if valid is None else valid[part],
                    None if finals is None else [None if x is None else x[part] for x in finals],
                    None if priorities is None else priorities[part],
                ),
                first,
                last,
            )

    def _check(
        self, rows: Any, leaves: Sequence[Array], structure: Any, first: int, last: int
    ) -> int:
        """The number of steps, of rows that are as the table's."""
        if not 0 <= first < last <= self.layout.envs:
            raise UserError(
                f"Rows were inserted for environments {first} to {last}, but the table has "
                f"{self.layout.envs}: give a range of these."
            )
        length = leaves[0].shape[0] if leaves and getattr(leaves[0], "ndim", 0) > 1 else 0
        fits = structure == self.structure and length > 0
        if fits:
            axes = (length, last - first)
            for leaf, array in zip(self.leaves, leaves, strict=True):
                if array.dtype != leaf.dtype or array.shape != axes + leaf.shape:
                    fits = False
        if not fits:
            check_leaves(self.leaves, rows, (max(length, 1), last - first), "rows")
            raise UserError(
                "What was inserted has another structure than the table's rows: "
                "insert the type of row that the table was made with."
            )
        return length

    def _final_leaves(self, final: Any, shape: tuple[int, int]) -> list[Array | None]:
        """What was seen after each step, leaf by leaf of a row; None for what was not given."""
        leaves, structure = jax.tree.flatten(final)
        if self._final_structure is None or self._final_structure[0] != structure:
            check_leaves(self.leaves, final, shape, "final")
            self._final_structure = (structure, final_positions(self.leaves, final))
        found: list[Array | None] = [None] * len(self.leaves)
        for at, array in zip(self._final_structure[1], leaves, strict=True):
            leaf = self.leaves[at]
            if array.dtype != leaf.dtype or array.shape != shape + leaf.shape:
                check_leaves(self.leaves, final, shape, "final")
            found[at] = array
        return found

    def _note_priorities(self, priorities: Array) -> None:
        """Checks priorities and remembers the highest."""
        if not priorities.size:
            return
        most = float(priorities.max())
        if not (float(priorities.min()) >= 0 and most < float("inf")):
            wrong = priorities[~((priorities >= 0) & (priorities < float("inf")))].ravel()[0]
            raise UserError(
                f"A priority is {wrong}: give finite numbers from 0 upwards (has training diverged?)."
            )
        self.highest = max(self.highest, most)

    def _insert(self, part: Chunk, first: int, last: int) -> None:
        """Writes the rows of a few steps."""
        _, ends, valid, _, _ = part
        simple = (
            (isinstance(self.table.items, Transitions) and not self.stacks)
            and (valid is None or valid.all())
            and (ends is None or not ends.any())
        )
        if simple:
            self._insert_steps(part, first, last)
        else:
            self._insert_any(part, first, last)
        self._settled = False
        if self._eager:
            self._settle()

    def _insert_steps(self, part: Chunk, first: int, last: int) -> None:
        """The common case: every step is a row and begins an item, and no episode ends."""
        leaves, _, _, _, priorities = part
        length = leaves[0].shape[0]
        heads, begun = self._heads[:, first:last], self.counters.begun[first:last]
        if length == 1:
            (places, slots), numbers = heads, begun
        else:
            ahead = self._ahead[:length]
            places = ((heads[0] + ahead) % self._laps[0]).ravel()
            slots = ((heads[1] + ahead) % self._laps[1]).ravel()
            numbers = (begun + np.arange(length)[:, None]).ravel()
        self.rows.write(places, [*leaves, None], places.size)
        self.begun_at[places] = numbers
        item = self.items
        item[slots, 0] = places
        item[slots, 1] = 0
        if self.index is not None:
            self.given[slots] = self.highest if priorities is None else priorities.ravel()
        begun += length
        heads += length * self.layout.envs
        np.remainder(heads, self._laps, out=heads)
        self.counters.fresh[first:last] = False

    def _insert_any(self, part: Chunk, first: int, last: int) -> None:
        leaves, ends, valid, finals, priorities = part
        shape = leaves[0].shape[:2]
        valid = np.ones(shape, bool) if valid is None else valid
        ends = np.zeros(shape, bool) if ends is None else ends
        here = slice(first, last)
        before = Counters(*(x[here] for x in self.counters))
        plan, after = make_plan(
            np, self.table, self.layout, before, self._streams[here], ends, valid
        )
        flat = [x.reshape(-1, *leaf.shape) for x, leaf in zip(leaves, self.leaves, strict=True)]
        steps = np.flatnonzero(valid)
        self._write(plan.step_at, plan.number, [x[steps] for x in flat], steps, final=False)
        if self.stacks:
            self._write_frames(plan, flat, steps)
        ended = np.flatnonzero(plan.final_at != DROP)
        if ended.size:
            self._insert_finals(plan, finals, ended)
        begins = np.flatnonzero(plan.item_at != DROP)
        slots = plan.item_at.ravel()[begins]
        self.items[slots, 0] = plan.step_at.ravel()[begins]
        self.items[slots, 1] = 0
        if self.index is not None:
            self.given[slots] = self.highest if priorities is None else priorities.ravel()[begins]
        for kept, new in zip(self.counters, after, strict=True):
            kept[here] = new
        self._heads[1, here] = (after.begun % self.layout.slots) * self.layout.envs + self._streams[
            here
        ]

    def _write(
        self,
        grid: Array,
        numbers: Array,
        leaves: Sequence[Array | None],
        chosen: Array,
        final: bool,
    ) -> None:
        """Writes the chosen of an insert's rows; `leaves` hold only these."""
        places = grid.ravel()[chosen]
        flags = np.full(chosen.size, final, np.uint8)
        self.rows.write(places, [*(leaves[at] for at in self.plain), flags], chosen.size)
        self.begun_at[places] = numbers.ravel()[chosen]

    def _insert_finals(self, plan: Any, finals: list[Array | None] | None, ended: Array) -> None:
        """The rows behind the ends of episodes."""
        shapes = [leaf.shape for leaf in self.leaves]
        values = [
            None if x is None else x.reshape(-1, *shape)[ended]
            for x, shape in zip(finals or [None] * len(shapes), shapes, strict=True)
        ]
        self._write(plan.final_at, plan.after, values, ended, final=True)
        if self.stacks:
            places = plan.final_frame.ravel()[ended]
            self.frames.write(places, [values[at] for at in self.stacked], -1)
            self.frame_at[plan.final_at.ravel()[ended]] = places
            self.frame_begun[places] = plan.after.ravel()[ended]

    def _write_frames(self, plan: Any, flat: Sequence[Array], steps: Array) -> None:
        """Each step's newest frame, and before an episode's first step the older ones."""
        stacks = [flat[at] for at in self.stacked]
        places = plan.step_frame.ravel()[steps]
        numbers = plan.number.ravel()
        whole = steps.size == len(stacks[0])
        self.frames.write(places, stacks if whole else [x[steps] for x in stacks], -1)
        self.frame_at[plan.step_at.ravel()[steps]] = places
        self.frame_begun[places] = numbers[steps]
        leads = np.flatnonzero(plan.leads)
        if leads.size:
            begins = [x[leads] for x in stacks]
            for back in range(1, self.layout.stack):
                older = (
                    plan.step_frame.ravel()[leads] - back * self.layout.envs
                ) % self.layout.frame_lane
                self.frames.write(older, begins, -1 - back)
                self.frame_begun[older] = numbers[leads]

    def _settle(self) -> None:
        """Which items are complete and which have left, after the inserts so far."""
        if self._settled:
            return
        self._settled = True
        high = complete(self.table, self.layout, self.counters, self.begun_at, np)
        low = oldest(self.layout, self.counters, high, self.begun_at, self.frame_begun, np)
        if self.index is None:
            np.cumsum(high - low, out=self._totals)
            self._offsets = low - (self._totals - (high - low))
        elif self.layout.owned:
            self._own(*self._span(self.high, high))
        else:
            self.index.drop(self._span(self.low, np.minimum(low, self.high))[0])
            slots, _ = self._span(np.maximum(self.high, low), high)
            self.index.add(slots, self.given[slots])
        self.high, self.low = high, low

    def _span(self, start: Array, end: Array) -> tuple[Array, Array]:
        """The slots and streams of items from number `start` to `end` of every stream, by age."""
        counts = np.maximum(end - start, 0)
        ages = np.arange(int(counts.max()))[:, None]
        age, stream = np.nonzero(ages < counts)
        return (start[stream] + age) % self.layout.slots * self.layout.envs + stream, stream

    def _own(self, slots: Array, _: Array) -> None:
        """Copies complete items to slots of their own, one after the other."""
        assert self.index is not None
        for slot in slots:
            if not self._free:
                victim = self.index.victim()
                self.index.drop(np.array([victim]))
                self._free.append(victim)
            own = self._free.pop()
            self._copy(int(self.items[slot, 0]), own)
            self.index.add(np.array([own]), self.given[slot : slot + 1])

    def _copy(self, place: int, own: int) -> None:
        layout = self.layout
        window = np.arange(layout.window)
        source = (place + window * layout.envs) % layout.lane
        target = own * layout.window + window
        self.own_rows.block[target] = self.rows.block[source]
        for at, store in self.own_rows.alone.items():
            store[target] = self.rows.alone[at][source]
        if self.stacks:
            frames = self._frame_places(source[None])[0].ravel()
            target = own * frames.size + np.arange(frames.size)
            for to, store in zip(self.own_frames.stores, self.frames.stores, strict=True):
                to[target] = store[frames]

    def _frame_places(self, places: Array) -> Array:
        """Where the frames of windows [n, W] are."""
        layout = self.layout
        back = np.arange(1 - layout.stack, 1) * layout.envs
        if self.table.items.cut:
            first = self.frame_at[places[:, 0] % layout.lane]
            ahead = np.arange(1 - layout.stack, layout.window) * layout.envs
            return (first[:, None] + ahead) % layout.frame_lane
        newest = self.frame_at[places % layout.lane]
        return (newest[..., None] + back) % layout.frame_lane

    def sample(self, draws: Array) -> Sample:
        """Items for draws [n] from [0, 1): the same draws choose the same items."""
        self.check_batch(draws.size)
        count = self.size
        if count == 0:
            raise UserError(
                "The replay table is empty, so nothing can be sampled: insert until an item is "
                "complete."
            )
        if self.index is None:
            slots, numbers = self._choose(draws, count)
            probabilities = np.full(draws.size, 1 / count, np.float32)
            times = self.items[slots, 1]
            np.add.at(self.items[:, 1], slots, 1)
        else:
            slots, probabilities = self.index.choose(draws)
            numbers = self.index.serial[slots]
        output = self._output(draws.size)
        output.read(slots)
        if self.index is not None:
            times = self.index.sampled(slots)
            if self.layout.owned and self.table.max_times_sampled is not None:
                gone = np.unique(slots[~self.index.live[slots]])
                self._free.extend(int(slot) for slot in gone)
        return Sample(
            output.tree, output.mask, Keys(slots, numbers), probabilities, np.int32(count), times
        )

    def _choose(self, draws: Array, count: int) -> tuple[Array, Array]:
        """The slots and numbers of items that are all alike, streams in order, the oldest first."""
        ranks = (draws * count).astype(np.int64)
        np.minimum(ranks, count - 1, out=ranks)
        streams = self._totals.searchsorted(ranks, side="right")
        numbers = ranks + self._offsets.take(streams)
        slots = numbers % self.layout.slots
        slots *= self.layout.envs
        slots += streams
        return slots, numbers

    def _output(self, count: int) -> "_Output":
        """The next buffer for samples of that size."""
        outputs = self._outputs.setdefault(count, [])
        if len(outputs) < self._buffers:
            outputs.append(_Output(self, count))
        else:
            outputs.append(outputs.pop(0))
        return outputs[-1]

    def update_priorities(self, keys: Keys, priorities: Array) -> None:
        """Gives items other priorities [n]; items that have left are passed over."""
        priorities = np.asarray(priorities)
        self._note_priorities(priorities)
        if self.index is None:
            return
        self._settle()
        slots = np.asarray(keys.slot)
        there = self.index.live[slots] & (self.index.serial[slots] == keys.number)
        if not there.all():
            slots, priorities = slots[there], priorities[there]
        self.index.update(slots, priorities)


class _Output:
    """Buffers for a sample, and the tree of views of them."""

    def __init__(self, table: HostTable, count: int) -> None:
        layout = table.layout
        self._table = table
        self._rows: Rows = (table.own_rows if layout.owned else table.rows).buffer(
            (count, layout.window)
        )
        store = table.own_frames if layout.owned else table.frames
        cut = table.table.items.cut
        shape = (layout.window + layout.stack - 1,) if cut else (layout.window, layout.stack)
        self._frames = [np.zeros((count, *shape, *s.shape), s.dtype) for s in store.stacks]
        leaves: list[Any] = [None] * len(table.leaves)
        for at, leaf in zip(table.plain, self._rows.leaves, strict=False):
            leaves[at] = leaf
        for at, stack, frames in zip(table.stacked, store.stacks, self._frames, strict=True):
            leaves[at] = stack.shared(frames) if cut else stack.whole(frames)
        self.tree = jax.tree.unflatten(table.structure, leaves)
        self.mask = np.zeros((count, layout.window), bool)
        self.mask[:, 0] = True

    def read(self, slots: Array) -> None:
        """Copies the windows of items."""
        table, layout = self._table, self._table.layout
        if layout.owned:
            places = slots[:, None] * layout.window + np.arange(layout.window)
        else:
            places = table.items[slots, :1] + np.arange(layout.window) * layout.envs
        self._rows.read(places)
        for buffer, store, frames in self._frame_reads(slots, places):
            store.take(frames, axis=0, out=buffer, mode="wrap")
        final = self._rows.leaves[-1]
        if not table.table.items.cut:
            np.equal(final, 0, out=self.mask)
        elif layout.window > 2:
            passed = np.logical_or.accumulate(final[:, :-1], axis=1)
            np.logical_not(passed, out=self.mask[:, :-1])

    def _frame_reads(self, slots: Array, places: Array) -> list[tuple[Array, Array, Array]]:
        if not self._frames:
            return []
        table = self._table
        if table.layout.owned:
            count = owned_frames(table.table, table.layout)
            frames = (slots[:, None] * count + np.arange(count)).reshape(
                self._frames[0].shape[: 2 + (not table.table.items.cut)]
            )
            stores = table.own_frames.stores
        else:
            frames, stores = table._frame_places(places), table.frames.stores
        return [(buffer, store, frames) for buffer, store in zip(self._frames, stores, strict=True)]
