"""A replay table's options (items, sampler, remover) and the sizes derived from them.

A `Table` states the options; `TableSizes` gives, for particular rows and environments, the size of
every array. Both are plain numbers, shared by the host and device tables.
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
    """Up to `steps` steps and the row after them; cut at the end of the episode."""

    steps: int = 1

    @property
    def window(self) -> int:
        """Rows per item."""
        return self.steps + 1

    @property
    def cut(self) -> bool:
        """Whether an item ends with its episode."""
        return True

    @property
    def pending(self) -> int:
        """Maximum number of incomplete items per stream."""
        return self.steps


@dataclass(frozen=True)
class Sequences:
    """`length` rows, starting at every `period`-th step; they may cross episode boundaries."""

    length: int
    period: int = 1

    @property
    def window(self) -> int:
        """Rows per item."""
        return self.length

    @property
    def cut(self) -> bool:
        """Whether an item ends with its episode."""
        return False

    @property
    def pending(self) -> int:
        """Maximum number of incomplete items per stream."""
        return ceil(self.length / self.period)


@dataclass(frozen=True)
class Episodes:
    """Whole episodes, one item each; longer ones are cut to their first `longest` steps."""

    longest: int

    @property
    def window(self) -> int:
        """Rows per item."""
        return self.longest + 1

    @property
    def cut(self) -> bool:
        """Whether an item ends with its episode."""
        return True

    @property
    def pending(self) -> int:
        """Maximum number of incomplete items per stream."""
        return 1


Items = Transitions | Sequences | Episodes


@dataclass(frozen=True)
class Uniform:
    """Every item with equal probability."""


@dataclass(frozen=True)
class Prioritized:
    """Probability proportional to priority ** `exponent`, https://arxiv.org/abs/1511.05952."""

    exponent: float = 0.6


@dataclass(frozen=True)
class Fifo:
    """The oldest item first."""


@dataclass(frozen=True)
class Lifo:
    """The newest item first."""


@dataclass(frozen=True)
class Highest:
    """The item with the highest priority first; ties go to the older item."""


@dataclass(frozen=True)
class Lowest:
    """The item with the lowest priority first; ties go to the older item."""


Selector = Uniform | Prioritized | Fifo | Lifo | Highest | Lowest


@dataclass(frozen=True)
class History:
    """A leaf that stacks the most recent frames, newest last; each frame is stored once."""

    path: str
    """Path of the leaf, such as `observation` or `observation/pixels`."""
    frames: int = 4
    """Frames in the stack."""
    axis: int = -1
    """The stacking axis."""


@dataclass(frozen=True)
class Table:
    """A replay table's options."""

    items: Items = Transitions()
    """The unit of sampling: transitions, sequences or episodes."""
    capacity: int = 100_000
    """Maximum number of items; with the `Fifo` remover each stream keeps an equal share of it."""
    sampler: Selector = Uniform()
    """How items are chosen."""
    remover: Selector = Fifo()
    """Which item makes room for a new one."""
    max_times_sampled: int | None = None
    """An item leaves after the batch in which it reaches this many samples; None: never."""
    max_bytes: int | None = None
    """Maximum bytes of stored rows; fewer items are kept if they would need more."""
    history: tuple[History, ...] = ()
    """Leaves that are frame stacks."""
    compress: bool = False
    """Whether large leaves and frames are stored compressed (zlib, level 1); host tables only. They
    count with their compressed size, and the oldest items leave when `max_bytes` is reached."""
    spare: float = 0.1
    """Space for rows that start no item (the final row of an episode) and for the extra frames at
    the start of an episode, as a fraction of the capacity; when short episodes need more, items
    leave earlier."""

    def __post_init__(self) -> None:
        check_table(self)

    @property
    def shared(self) -> bool:
        """Whether overlapping items share rows in rings; otherwise each item owns its rows."""
        return isinstance(self.remover, Fifo)

    @property
    def ranged(self) -> bool:
        """Whether a stream's items are a contiguous range of numbers, which needs no index."""
        return self.shared and isinstance(self.sampler, Uniform) and self.max_times_sampled is None

    @property
    def frames(self) -> int:
        """Frames per stack; 1 without a history."""
        return self.history[0].frames if self.history else 1

    def exponent(self, selector: Selector) -> float:
        """Exponent of the priority in a selector's probabilities; 0 unless prioritized."""
        return selector.exponent if isinstance(selector, Prioritized) else 0.0


def check_table(table: Table) -> None:
    """Raises if options are invalid."""
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
    """Sizes of a table's arrays for particular rows and environments."""

    envs: int
    """Number of streams."""
    share: int
    """Maximum number of items per stream that can be sampled; with owned rows, only those not yet
    copied out."""
    slots: int
    """Item slots per stream, including items that wait for rows."""
    rows: int
    """Rows in each stream's ring."""
    frames: int
    """Frames in each stream's ring of frames; 0 without a history."""
    owned: int
    """Number of items that own their rows; 0 where rows are shared."""
    window: int
    """Rows per item."""
    stack: int
    """Frames per stack; 1 without a history."""

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
        """Maximum number of steps per insert, so that no row overwrites one of the same insert."""
        # A step takes at most two rows: its own and a final one.
        room = min(self.slots, (self.rows - self.window) // 2)
        if self.frames:
            # At worst every step is a whole episode: a full stack and a final frame.
            most = (self.stack + 1) * self.window
            room = min(room, (self.frames - most) // (self.stack + 1))
        return room

    @property
    def size(self) -> int:
        """Total number of slots for items that can be sampled."""
        return self.owned or self.slots * self.envs


SMALL = 512
"""Leaves up to this many bytes are packed together and not compressed."""
ROOM = 2
"""Extra steps of space in every ring, beyond its items."""
STAGED = 32
"""Steps of space in the rings where items own their rows and the rings only feed them."""


def make_layout(
    table: Table, leaves: Sequence[RowLeaf], envs: int, on_host: bool = False
) -> TableSizes:
    """The largest layout within the table's capacity in items and in bytes."""
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
    low, high = 1, most  # bisection: `low` items fit, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        fits = stored_bytes(table, leaves, envs, middle) <= table.max_bytes
        low, high = (middle, high) if fits else (low, middle)
    return layout_with(table, envs, low)


def layout_with(table: Table, envs: int, most: int) -> TableSizes:
    """The layout for `most` items: per stream where rows are shared, otherwise in total."""
    items, window, stack = table.items, table.items.window, table.frames
    share = most if table.shared else STAGED
    if not table.shared:
        # Two rows per staged step: every step may end an episode.
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
    """Bytes of the rows and frames of a layout, excluding compressed ones."""
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
        if compressed:  # counted when they are inserted
            kept = (0 if table.shared else kept[0], 0)
        total += size * sum(kept)
    return total


def owned_frames(table: Table, layout: TableSizes) -> int:
    """Frames in an item's window; its rows share them when the item stays within one episode."""
    if table.items.cut:
        return layout.window + layout.stack - 1
    return layout.window * layout.stack


Tree = Any
"""A pytree of arrays: a row, or part of one."""
