"""What a replay table keeps, which item it gives and which it lets go: options and sizes.

A `Table` states the options; `TableSizes` holds, for given rows and environments, how much of
everything is stored. Both are plain numbers: the tables on the host and on the device share them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import numpy as np

from dovetail.errors import UserError
from dovetail.replay.leaves import RowLeaf


@dataclass(frozen=True)
class Transitions:
    """Up to `steps` steps and the row after them; cut where the episode ends."""

    steps: int = 1

    @property
    def window(self) -> int:
        """Rows of an item."""
        return self.steps + 1

    @property
    def cut(self) -> bool:
        """Whether an item ends with its episode."""
        return True

    @property
    def pending(self) -> int:
        """The most items of a stream that have begun and wait for rows."""
        return self.steps


@dataclass(frozen=True)
class Sequences:
    """`length` rows, beginning at every `period`-th step; they may cross the ends of episodes."""

    length: int
    period: int = 1

    @property
    def window(self) -> int:
        """Rows of an item."""
        return self.length

    @property
    def cut(self) -> bool:
        """Whether an item ends with its episode."""
        return False

    @property
    def pending(self) -> int:
        """The most items of a stream that have begun and wait for rows."""
        return ceil(self.length / self.period)


@dataclass(frozen=True)
class Episodes:
    """Whole episodes, one item each; of a longer one, its first `longest` steps."""

    longest: int

    @property
    def window(self) -> int:
        """Rows of an item."""
        return self.longest + 1

    @property
    def cut(self) -> bool:
        """Whether an item ends with its episode."""
        return True

    @property
    def pending(self) -> int:
        """The most items of a stream that have begun and wait for rows."""
        return 1


Items = Transitions | Sequences | Episodes


@dataclass(frozen=True)
class Uniform:
    """Every item alike."""


@dataclass(frozen=True)
class Prioritized:
    """In proportion to priority ** `exponent`, https://arxiv.org/abs/1511.05952."""

    exponent: float = 0.6


@dataclass(frozen=True)
class Fifo:
    """The oldest item first."""


@dataclass(frozen=True)
class Lifo:
    """The newest item first."""


@dataclass(frozen=True)
class Highest:
    """The item of the highest priority first; of equals the older."""


@dataclass(frozen=True)
class Lowest:
    """The item of the lowest priority first; of equals the older."""


Selector = Uniform | Prioritized | Fifo | Lifo | Highest | Lowest


@dataclass(frozen=True)
class History:
    """A leaf of the rows that is a stack of the last frames, newest last: each is stored once."""

    path: str
    """The leaf, as `observation` or `observation/pixels`."""
    frames: int = 4
    """Frames in the stack."""
    axis: int = -1
    """The axis along which they are stacked."""


@dataclass(frozen=True)
class Table:
    """A replay table's options."""

    items: Items = Transitions()
    """What is sampled: transitions, sequences or episodes."""
    capacity: int = 100_000
    """The most items; with the `Fifo` remover each stream keeps its equal share of them."""
    sampler: Selector = Uniform()
    """How items are chosen."""
    remover: Selector = Fifo()
    """Which item makes room for a new one."""
    max_times_sampled: int | None = None
    """An item leaves after the batch in which it has been sampled so often; None: never."""
    max_bytes: int | None = None
    """The most bytes of stored rows; fewer items are kept if they would need more."""
    history: tuple[History, ...] = ()
    """Leaves that are stacks of frames."""
    compress: bool = False
    """Whether large leaves and frames are kept compressed (zlib, level 1): on the host only. They
    then count with what they really take, and the oldest items leave when `max_bytes` is reached.
    """
    spare: float = 0.1
    """Room for rows that begin no item (what an episode ended with) and for the frames that an
    episode begins with, as a share of the capacity; when short episodes use up more, items leave
    earlier."""

    def __post_init__(self) -> None:
        check_table(self)

    @property
    def shared(self) -> bool:
        """Whether overlapping items share their rows, in rings; else each item owns its rows."""
        return isinstance(self.remover, Fifo)

    @property
    def ranged(self) -> bool:
        """Whether a stream's items are a range of numbers, sampled without an index of items."""
        return self.shared and isinstance(self.sampler, Uniform) and self.max_times_sampled is None

    @property
    def frames(self) -> int:
        """Frames in the stacks; 1 without any."""
        return self.history[0].frames if self.history else 1

    def exponent(self, selector: Selector) -> float:
        """The power of the priority that a random choice is proportional to."""
        return selector.exponent if isinstance(selector, Prioritized) else 0.0


def check_table(table: Table) -> None:
    """Refuses options that cannot be."""
    items = table.items
    if isinstance(items, Sequences):
        wrong = items.length < 2 or not 1 <= items.period <= items.length
        limits = "a length of at least 2 and a period from 1 to it"
    else:
        wrong, limits = items.window < 2, "at least 1 step"
    if wrong:
        raise UserError(f"The replay table's items are {items}: give {limits}.")
    if table.capacity < 1:
        raise UserError(f"The replay table's capacity is {table.capacity}: give at least 1 item.")
    if table.max_times_sampled is not None and table.max_times_sampled < 1:
        raise UserError(
            f"max_times_sampled is {table.max_times_sampled}: give at least 1, or None for ever."
        )
    for selector in (table.sampler, table.remover):
        if isinstance(selector, Prioritized) and not 0 <= selector.exponent < float("inf"):
            raise UserError(
                f"The priorities' exponent is {selector.exponent}: give a number from 0 upwards."
            )
    if not 0 <= table.spare < float("inf"):
        raise UserError(f"The replay table's spare is {table.spare}: give a share from 0 upwards.")
    if len({stack.frames for stack in table.history}) > 1:
        raise UserError("The histories of a replay table differ in their frames: give one number.")
    if any(stack.frames < 2 for stack in table.history):
        raise UserError("A history has fewer than 2 frames: leave it out, the leaf is no stack.")


@dataclass(frozen=True)
class TableSizes:
    """How many of what a table stores for given rows and environments."""

    envs: int
    """Streams."""
    share: int
    """The most items of a stream that can be sampled; with owned rows, only those under way."""
    slots: int
    """Slots for a stream's items, those that wait for rows included."""
    rows: int
    """Rows in a stream's ring."""
    frames: int
    """Frames in a stream's ring of frames; 0 without a history."""
    owned: int
    """Items that own their rows; 0 where rows are shared."""
    window: int
    """Rows of an item."""
    stack: int
    """Frames in a stack; 1 without a history."""

    @property
    def lane(self) -> int:
        """Flat size of the rings of rows: row `r` of stream `e` is at r × envs + e."""
        return self.rows * self.envs

    @property
    def frame_lane(self) -> int:
        """Flat size of the rings of frames."""
        return self.frames * self.envs

    @property
    def chunk(self) -> int:
        """Steps that are inserted at a time, so that no row overwrites one of the same insert."""
        room = min(self.slots, (self.rows - self.window) // 2)
        if self.frames:
            most = (self.stack + 1) * self.window
            room = min(room, (self.frames - most) // (self.stack + 1))
        return room

    @property
    def size(self) -> int:
        """Slots of items that can be sampled, of all streams."""
        return self.owned or self.slots * self.envs


SMALL = 512
"""Bytes up to which a leaf is packed with others, and not compressed."""
ROOM = 2
"""Steps for which every ring has room beside its items."""
STAGED = 32
"""Steps for which there is room where items own their rows and the rings only lead to them."""


def make_layout(
    table: Table, leaves: Sequence[RowLeaf], envs: int, on_host: bool = False
) -> TableSizes:
    """The layout within the table's capacity in items and in bytes."""
    if table.compress and not on_host:
        raise UserError(
            "A compressed replay table was asked for inside a compiled program: keep it on the "
            "host, or leave `compress` out."
        )
    if envs < 1:
        raise UserError(f"A replay table is made for {envs} environments: give at least 1.")
    if table.shared and table.capacity < envs:
        raise UserError(
            f"The replay table's capacity is {table.capacity} items for {envs} environments: "
            "give at least one item for each."
        )
    most = table.capacity // envs if table.shared else table.capacity
    if table.max_bytes is None or stored_bytes(table, leaves, envs, most) <= table.max_bytes:
        return layout_with(table, envs, most)
    least = stored_bytes(table, leaves, envs, 1)
    if least > table.max_bytes:
        raise UserError(
            f"The replay table's max_bytes is {table.max_bytes}, but the smallest table of these "
            f"rows for {envs} environments takes {least} bytes: give at least these."
        )
    low, high = 1, most  # the most that fits is at least low and less than high
    while high - low > 1:
        middle = (low + high) // 2
        fits = stored_bytes(table, leaves, envs, middle) <= table.max_bytes
        low, high = (middle, high) if fits else (low, middle)
    return layout_with(table, envs, low)


def layout_with(table: Table, envs: int, most: int) -> TableSizes:
    """The layout for `most` items, of each stream where rows are shared, else of all."""
    items, window, stack = table.items, table.items.window, table.frames
    share = most if table.shared else STAGED
    if not table.shared:
        rows = window + 2 * STAGED
    elif isinstance(items, Episodes):
        rows = window * share + 2 * ROOM
    else:
        period = items.period if isinstance(items, Sequences) else 1
        rows = ceil(period * share * (1 + table.spare)) + window + 2 * ROOM
    frames = max(rows + stack + 1, (stack + 1) * (window + 1))
    return TableSizes(
        envs=envs,
        share=share,
        slots=share + items.pending,
        rows=rows,
        frames=frames if table.history else 0,
        owned=0 if table.shared else most,
        window=window,
        stack=stack,
    )


def stored_bytes(table: Table, leaves: Sequence[RowLeaf], envs: int, most: int) -> int:
    """Bytes of the rows and frames that a layout stores, without those that are compressed."""
    layout = layout_with(table, envs, most)
    stacks = {stack.path: stack for stack in table.history}
    total = 0
    for leaf in leaves:
        size = prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        compressed = table.compress and (leaf.path in stacks or size > SMALL)
        if leaf.path in stacks:
            size //= layout.stack
            kept = (layout.frame_lane, layout.owned * owned_frames(table, layout))
        else:
            kept = (layout.lane, layout.owned * layout.window)
        if compressed:  # they are counted as they come
            kept = (0 if table.shared else kept[0], 0)
        total += size * sum(kept)
    return total


def owned_frames(table: Table, layout: TableSizes) -> int:
    """Frames that an item's window needs: shared by its rows, where it stays in one episode."""
    if table.items.cut:
        return layout.window + layout.stack - 1
    return layout.window * layout.stack


Tree = Any
"""A pytree of arrays; a row, or a part of one."""
