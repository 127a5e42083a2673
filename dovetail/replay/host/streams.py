"""The streams of a host table: rings of rows and frames, and the items that start in them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dovetail.replay.host.columns import ItemColumns
from dovetail.replay.host.compressed import Budget
from dovetail.replay.host.form import RowForm
from dovetail.replay.host.frames import HostFrames
from dovetail.replay.host.incoming import IncomingSteps, Plain
from dovetail.replay.host.packed import PackedRows
from dovetail.replay.table import Transitions
from dovetail.replay.windows import DROP, Counters, InsertPlan, complete, make_plan, oldest

Array = np.ndarray[Any, np.dtype[Any]]

PARTS = 64
"""Number of stream ranges for which views are cached."""


def is_plain(steps: IncomingSteps) -> bool:
    """Whether every step is a row, and no episode ends."""
    valid, ends = steps.valid, steps.ends
    if steps.broken is not None:
        return False
    return (valid is None or np.count_nonzero(valid) == valid.size) and (
        ends is None or not np.count_nonzero(ends)
    )


class Written(NamedTuple):
    """The rows stored by an insert; valid until the next one."""

    plain: Plain
    newest: Array | None
    """Positions of the newest frames; None without a history."""


class Streams:
    """The rings of all environments, and the start of each item."""

    def __init__(self, form: RowForm) -> None:
        table, layout = form.table, form.layout
        self.form, self.table, self.layout, self.leaves = form, table, layout, form.leaves
        self.plain, self.stacked, self.stacks = form.plain, form.stacked, form.stacks
        envs = layout.envs
        turns = envs if table.compress and table.shared else 0
        self.rows = PackedRows(form.kept, form.packing, layout.lane, turns)
        self.frames = HostFrames(self.stacks, layout.frame_lane, turns)
        self.begun_at = np.zeros(layout.lane, np.int64)
        """For each row, the number of items of its stream started before it."""
        self.frame_at = np.zeros(layout.lane if self.stacks else 0, np.int64)
        """For each row, the position of its newest frame."""
        self.frame_begun = np.zeros(layout.frame_lane, np.int64)
        self.items = ItemColumns(layout.slots * envs, table.ranged)
        self.starts, self.given, self.times = self.items.start, self.items.given, self.items.times
        self._numbers = np.arange(envs)
        self.heads = np.stack([self._numbers] * 2)
        """Positions of each stream's next row and next item."""
        self._laps = np.array([[layout.lane], [layout.slots * envs]])
        self._ahead = np.arange(layout.chunk)[:, None]
        # `cursor` is a view of `heads`: the common path moves both heads in one operation.
        self.counters = Counters(
            cursor=self.heads[0],
            frame_cursor=self._numbers.copy(),
            begun=np.zeros(envs, np.int64),
            ended=np.zeros(envs, np.int64),
            steps=np.zeros(envs, np.int64),
            fresh=np.ones(envs, bool),
        )
        self.budget: Budget | None = None
        if turns and table.max_bytes is not None:
            self.budget = Budget(self, max(table.max_bytes - self.rows.block.nbytes, 0) // envs)
        self.floor: Array | None = None
        """Number of each stream's oldest item whose rows are not lost; None if all are intact."""
        self.broken = False
        """Whether an episode was ever broken off; then even one-step transitions need their mask.
        To compute it for every sample costs a quarter of the speed of uniform sampling."""
        self._until_wrap = 0  # number of plain steps that certainly need no wrap
        self._window = range(envs, layout.window * envs, envs)
        self._plainly = isinstance(table.items, Transitions)
        self._ranged = table.ranged
        self._parts: dict[tuple[int, int], tuple[Array, Array, Array, Array]] = {}
        """For ranges of streams, views of their heads (both, rows, items) and of `begun`."""
        self.written: Written | None = None
        """Rows stored by the last insert, if all steps were rows within episodes."""

    def insert(self, steps: IncomingSteps, first: int, last: int, default: float) -> None:
        """Appends steps to streams `first` … `last` - 1."""
        self.written = None
        # With stacks, the first step of an episode also stores older frames: it is not plain.
        if self._plainly and is_plain(steps) and not (self.stacks and self.begins(first, last)):
            self.insert_plain(self._packed(steps, last - first), first, last, default)
        elif self._plainly and not self.stacks and steps.leaves[0].shape[0] == 1:
            self._insert_step(steps, first, last, default)
        else:
            self._insert_any(steps, slice(first, last), default)
        if self.budget is not None:
            self.budget.enforce(first, last)

    def break_off(self, where: Array, first: int) -> None:
        """Ends open episodes of the streams from `first`, `where` [B] a new one starts although the
        last did not end: its environment was set up anew.

        The successor of the last rows is unknown, so they become final rows, and the items they
        started hold no step.
        """
        begun, ended = self.counters.begun, self.counters.ended
        streams = np.flatnonzero(where) + first
        # Only streams in the middle of an episode.
        streams = streams[begun[streams] > ended[streams]]
        if not self.table.items.cut or not streams.size:
            return
        back = np.arange(1, self.layout.window)[:, None] * self.layout.envs
        flags = self.form.packing.views(self.rows.block)[len(self.form.kept) - 1]
        # The flag of final rows is the last leaf that is packed.
        flags[(self.heads[0, streams] - back) % self.layout.lane] = 1
        self.broken = True
        ended[streams] = begun[streams]
        self.counters.fresh[streams] = True

    def begins(self, first: int, last: int) -> bool:
        """Whether the next step of any of these streams starts an episode."""
        return bool(np.count_nonzero(self.counters.fresh[first:last]))

    def _packed(self, steps: IncomingSteps, envs: int) -> Plain:
        """Plain steps in storage format."""
        length, priorities = steps.leaves[0].shape[0], steps.priorities
        given = None if priorities is None else priorities.ravel()
        leaves = [steps.leaves[at] for at in self.plain] if self.stacks else steps.leaves
        block = self.rows.pack(leaves, (length, envs))
        if not self.stacks and not self.rows.alone:
            return Plain(length, block, [], [], given)
        alone = [leaves[at].reshape(-1, *leaves[at].shape[2:]) for at in self.rows.alone]
        frames: list[Array] = []
        for stack, at in zip(self.stacks, self.stacked, strict=True):
            stacks = steps.leaves[at]
            frames.append(stack.frame(stacks.reshape(-1, *stacks.shape[2:]), -1))
        return Plain(length, block, alone, frames, given)

    def insert_plain(self, plain: Plain, first: int, last: int, default: float) -> None:
        """The common case: every step is a row that starts an item, and no episode ends."""
        length, given = plain.length, plain.priorities
        heads, places, slots, begun = self._parts.get((first, last)) or self._part(first, last)
        numbers = begun
        if length > 1:
            ahead = self._ahead[:length]
            all_heads = (heads[:, None] + ahead * self.layout.envs) % self._laps[:, None]
            places, slots = all_heads.reshape(2, -1)
            numbers = (begun + ahead).ravel()
        self.rows.store(places, plain.block, plain.alone)
        self._begin(slots, places, numbers, default if given is None else given)
        newest = self._frame_plain(plain, first, last, places, numbers) if self.stacks else None
        self.written = Written(plain, newest)
        begun += length
        heads += length * self.layout.envs
        self._until_wrap -= length
        if self._until_wrap <= 0:
            self._wrap()

    def _part(self, first: int, last: int) -> tuple[Array, Array, Array, Array]:
        """Views of a range of streams, cached."""
        # Cleared at once: actors insert for a few fixed ranges, so this is rare.
        if len(self._parts) >= PARTS:
            self._parts.clear()
        heads = self.heads[:, first:last]
        found = (heads, heads[0], heads[1], self.counters.begun[first:last])
        self._parts[(first, last)] = found
        return found

    def _wrap(self) -> None:
        """Wraps positions that reached the end of a ring."""
        # Only when a head may have reached the end, which saves a division in most inserts.
        np.remainder(self.heads, self._laps, out=self.heads)
        self._until_wrap = int(((self._laps - self.heads) // self.layout.envs).min())

    def _frame_plain(
        self, plain: Plain, first: int, last: int, places: Array, numbers: Array
    ) -> Array:
        """Stores the newest frames of steps within episodes; returns their positions."""
        cursor = self.counters.frame_cursor[first:last]
        ahead = np.arange(plain.length + 1)[:, None] * self.layout.envs
        newest = (cursor + ahead) % self.layout.frame_lane
        at = newest[:-1].ravel()
        for store, frames in zip(self.frames.stores, plain.frames, strict=True):
            store[at] = frames
        self.frame_at[places] = at
        self.frame_begun[at] = numbers
        cursor[...] = newest[-1]
        return at

    def _insert_step(self, steps: IncomingSteps, first: int, last: int, default: float) -> None:
        """One step per environment, of which some are no rows or end episodes."""
        priorities = steps.priorities
        if steps.valid is None or steps.valid.all():
            self.insert_plain(self._packed(steps, last - first), first, last, default)
            self.written = None
        else:
            here = np.flatnonzero(steps.valid[0])
            streams = here + first
            heads, numbers = self.heads[:, streams], self.counters.begun[streams]
            self.rows.write(heads[0], [*(x[0, here] for x in steps.leaves), None], here.size)
            given = default if priorities is None else priorities[0, here]
            self._begin(heads[1], heads[0], numbers, given)
            self.counters.begun[streams] = numbers + 1
            self.heads[:, streams] = (heads + self.layout.envs) % self._laps
            self._until_wrap = 0
        if steps.ends is not None:
            ends = steps.ends[0] if steps.valid is None else steps.ends[0] & steps.valid[0]
            self._end(np.flatnonzero(ends), steps.final, first)

    def _end(self, here: Array, final: list[Array | None] | None, first: int) -> None:
        """Ends the episodes of some environments with the previous step."""
        values = [None if x is None else x[0, here] for x in final or [None] * len(self.leaves)]
        streams = here + first
        places, begun = self.heads[0, streams], self.counters.begun[streams]
        self.rows.write(places, [*values, np.ones(here.size, np.uint8)], here.size)
        self.begun_at[places] = begun
        self.counters.ended[streams] = begun
        self.heads[0, streams] = (places + self.layout.envs) % self.layout.lane
        self._until_wrap -= 1

    def _begin(self, slots: Array, places: Array, numbers: Array, given: Any) -> None:
        """Starts items at rows."""
        self.begun_at[places] = numbers
        self.starts[slots] = places
        self.times[slots] = 0
        if not self._ranged:
            self.given[slots] = given

    def _insert_any(self, steps: IncomingSteps, here: slice, default: float) -> None:
        """The general case: any mix of steps, ends of episodes and invalid steps."""
        shape = steps.leaves[0].shape[:2]
        valid = np.ones(shape, bool) if steps.valid is None else steps.valid
        ends = np.zeros(shape, bool) if steps.ends is None else steps.ends
        before = Counters(*(x[here] for x in self.counters))
        streams = self._numbers[here]
        # The general case: the same arithmetic as on the device.
        plan, after = make_plan(np, self.table, self.layout, before, streams, ends, valid)
        self._write_steps(plan, steps.leaves, np.flatnonzero(valid))
        ended = np.flatnonzero(plan.final_at != DROP)
        if ended.size:
            self._write_finals(plan, steps.final, ended)
        begins = np.flatnonzero(plan.item_at != DROP)
        slots = plan.item_at.ravel()[begins]
        given = default if steps.priorities is None else steps.priorities.ravel()[begins]
        self._begin(slots, plan.step_at.ravel()[begins], plan.number.ravel()[begins], given)
        for kept, new in zip(self.counters, after, strict=True):
            kept[here] = new
        self.heads[1, here] = after.begun % self.layout.slots * self.layout.envs + streams
        self._until_wrap = 0

    def _write_steps(self, plan: InsertPlan, leaves: Sequence[Array], steps: Array) -> None:
        """Stores the valid steps; `steps` are their indices in the flattened [T × B]."""
        flat = [x.reshape(-1, *leaf.shape) for x, leaf in zip(leaves, self.leaves, strict=True)]
        if steps.size < plan.step_at.size:
            flat = [x[steps] for x in flat]
        places, numbers = plan.step_at.ravel()[steps], plan.number.ravel()[steps]
        self.rows.write(places, [*(flat[at] for at in self.plain), None], steps.size)
        self.begun_at[places] = numbers
        if self.stacks:
            self._write_frames(plan, [flat[at] for at in self.stacked], places, numbers, steps)

    def _write_frames(
        self, plan: InsertPlan, stacks: Sequence[Array], places: Array, numbers: Array, steps: Array
    ) -> None:
        """Stores each step's newest frame, and before an episode's first step the older ones."""
        newest = plan.step_frame.ravel()[steps]
        self.frames.write(newest, stacks, -1)
        self.frame_at[places] = newest
        self.frame_begun[newest] = numbers
        leads = np.flatnonzero(plan.leads.ravel()[steps])
        if leads.size:
            first = [x[leads] for x in stacks]
            for back in range(1, self.layout.stack):
                older = (newest[leads] - back * self.layout.envs) % self.layout.frame_lane
                self.frames.write(older, first, -1 - back)
                self.frame_begun[older] = numbers[leads]

    def _write_finals(
        self, plan: InsertPlan, final: list[Array | None] | None, ended: Array
    ) -> None:
        """Stores the rows after the ends of episodes."""
        values = [
            None if x is None else x.reshape(-1, *leaf.shape)[ended]
            for x, leaf in zip(final or [None] * len(self.leaves), self.leaves, strict=True)
        ]
        places, numbers = plan.final_at.ravel()[ended], plan.after.ravel()[ended]
        flags = np.ones(ended.size, np.uint8)
        self.rows.write(places, [*(values[at] for at in self.plain), flags], ended.size)
        self.begun_at[places] = numbers
        if self.stacks:
            frames = plan.final_frame.ravel()[ended]
            self.frames.write(frames, [values[at] for at in self.stacked], -1)
            self.frame_at[places] = frames
            self.frame_begun[frames] = numbers

    def completed(self) -> int:
        """Number of items ever completed."""
        return int(complete(self.table, self.layout, self.counters, self.begun_at, np).sum())

    def bounds(self) -> tuple[Array, Array]:
        """For each stream, the number of its oldest item and one past its newest."""
        high = complete(self.table, self.layout, self.counters, self.begun_at, np)
        low = oldest(self.layout, self.counters, high, self.begun_at, self.frame_begun, np)
        if self.floor is not None:
            low = np.minimum(np.maximum(low, self.floor), high)
        return low if self.budget is None else np.maximum(low, self.budget.floor), high

    def span(self, start: Array, end: Array) -> tuple[Array, Array]:
        """Slots and numbers of the items `start` … `end` - 1 of every stream, ordered by age."""
        counts = np.maximum(end - start, 0)
        age, stream = np.nonzero(np.arange(int(counts.max()))[:, None] < counts)
        numbers = start[stream] + age
        return numbers % self.layout.slots * self.layout.envs + stream, numbers

    def windows(self, slots: Array, out: Array | None = None) -> Array:
        """Positions of the items' rows [W, n]; those past the end wrap around."""
        places = np.empty((self.layout.window, slots.size), np.int64) if out is None else out
        first = places[0]
        first[...] = self.starts[slots]
        for at, ahead in enumerate(self._window, start=1):
            np.add(first, ahead, out=places[at])
        return places

    def frame_places(self, places: Array) -> Array:
        """Positions of the frames of windows [W, n]: [n, W + k - 1]; across episodes, [n, W, k]."""
        layout = self.layout
        if self.table.items.cut:
            first = self.frame_at[places[0] % layout.lane]
            return first[:, None] + np.arange(1 - layout.stack, layout.window) * layout.envs
        newest = self.frame_at[places.T % layout.lane]
        return newest[..., None] + np.arange(1 - layout.stack, 1) * layout.envs
