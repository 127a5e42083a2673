"""Positions of inserted rows, the items they start, and the items of a stream that can be sampled.

Integer arithmetic on counters, written once for numpy and jax.numpy (`xp`), so the host and device
tables agree by construction. Rings are time-major: row `r` of stream `e` is at r × envs + e, modulo
the ring's flat size, so the next row of a stream is always `envs` positions further.
"""

from types import ModuleType
from typing import Any, NamedTuple

from dovetail.replay.table import Episodes, Sequences, Table, TableSizes, Transitions

Array = Any
"""A numpy or JAX array."""

DROP = 1 << 30
"""An index past the end of every array: writes to it are dropped."""


class Counters(NamedTuple):
    """Counters of each stream [E]."""

    cursor: Array
    """Flat position of the next row in the rings of rows."""
    frame_cursor: Array
    """Flat position of the next frame; stays 0 without a history."""
    begun: Array
    """Number of items started."""
    ended: Array
    """Number of items started when the last episode ended; 0 if items may cross episodes."""
    steps: Array
    """Steps so far, modulo the period of sequences; otherwise 0."""
    fresh: Array
    """Whether the next step starts an episode."""


class InsertPlan(NamedTuple):
    """Positions of the rows of an insert [T, B]; `DROP` where there is no row."""

    step_at: Array
    """Ring position of each step."""
    final_at: Array
    """Ring position of the row after each step that ends an episode."""
    item_at: Array
    """Slot of the item that starts at the step."""
    number: Array
    """Number of items started before the step."""
    after: Array
    """Number of items started up to and including the step."""
    step_frame: Array
    """Position of each step's newest frame; only with a history."""
    final_frame: Array
    """Position of each final row's newest frame; only with a history."""
    leads: Array
    """Whether the step starts an episode, so that its older frames are stored before it."""


def make_plan(
    xp: ModuleType,
    table: Table,
    layout: TableSizes,
    counters: Counters,
    streams: Array,
    ends: Array,
    valid: Array,
) -> tuple[InsertPlan, Counters]:
    """Positions of an insert's rows [T, B], and the counters [B] after it.

    `streams` [B] are the environments that the columns belong to; `ends` and `valid` are [T, B].
    """
    envs, lane = layout.envs, layout.lane
    step = valid.astype(counters.begun.dtype)
    final = (valid & ends).astype(step.dtype)
    # A step that ends an episode takes two rows: its own and the final one.
    width = step + final
    # Exclusive cumulative sum: the rows written before each step.
    at = counters.cursor + (xp.cumsum(width, axis=0) - width) * envs
    fresh, fresh_after = episode_starts(xp, valid, valid & ends, counters.fresh)
    begins = item_begins(xp, table, counters.steps, step, fresh)
    after = counters.begun + xp.cumsum(begins, axis=0, dtype=step.dtype)
    number = after - begins
    leads = step * fresh
    # The first step of an episode also stores the older frames of its stack.
    frame_width = width + (layout.stack - 1) * leads
    frame = counters.frame_cursor + (xp.cumsum(frame_width, axis=0) - frame_width) * envs
    newest = frame + (layout.stack - 1) * envs * leads
    # Without a history the size is 0, which would be a modulo by zero.
    frames = max(layout.frame_lane, 1)
    plan = InsertPlan(
        step_at=xp.where(valid, at % lane, DROP),
        final_at=xp.where(final > 0, (at + envs) % lane, DROP),
        item_at=xp.where(begins > 0, (number % layout.slots) * envs + streams, DROP),
        number=number,
        after=after,
        step_frame=xp.where(valid, newest % frames, DROP),
        final_frame=xp.where(final > 0, (newest + envs) % frames, DROP),
        leads=leads > 0,
    )
    # The last end of an episode in this insert; 0 if there was none.
    ended = xp.max(xp.where(final > 0, after, 0), axis=0)
    period = table.items.period if isinstance(table.items, Sequences) else 1
    return plan, Counters(
        cursor=(counters.cursor + width.sum(0, dtype=step.dtype) * envs) % lane,
        frame_cursor=(counters.frame_cursor + frame_width.sum(0, dtype=step.dtype) * envs) % frames,
        begun=after[-1],
        ended=xp.maximum(counters.ended, ended) if table.items.cut else counters.ended,
        steps=(counters.steps + step.sum(0, dtype=step.dtype)) % period,
        fresh=fresh_after,
    )


def episode_starts(xp: ModuleType, valid: Array, final: Array, fresh: Array) -> tuple[Array, Array]:
    """Whether an episode starts at each step [T, B], and at the step after the last one [B]."""
    rows = [fresh]
    for time in range(valid.shape[0] if valid.shape[0] <= UNROLLED else 0):
        rows.append(xp.where(valid[time], final[time], rows[-1]))
    # Short inserts are common: a few `where`s instead of a running maximum and a gather.
    if len(rows) > 1:
        return xp.stack(rows[:-1]), rows[-1]
    times = xp.arange(1, valid.shape[0] + 1)[:, None]
    last = running_max(xp, xp.where(valid, times, 0))  # latest valid step, counted from 1; 0: none
    known = xp.concatenate([fresh[None], final])
    state = xp.take_along_axis(known, last, axis=0)
    return xp.concatenate([fresh[None], state[:-1]]), state[-1]


UNROLLED = 4
"""Up to this many steps, the recurrence over time is unrolled in Python."""


def running_max(xp: ModuleType, values: Array) -> Array:
    """Cumulative maximum along the first axis."""
    if xp.__name__ == "numpy":
        return xp.maximum.accumulate(values, axis=0)
    from jax import lax

    return lax.cummax(values, axis=0)


def item_begins(xp: ModuleType, table: Table, steps: Array, step: Array, fresh: Array) -> Array:
    """1 where a step starts an item [T, B]."""
    items = table.items
    if isinstance(items, Transitions):
        return step
    if isinstance(items, Episodes):
        return step * fresh
    # Steps before this one, across inserts: sequences start at fixed distances.
    count = steps + xp.cumsum(step, axis=0, dtype=step.dtype) - step
    return step * (count % items.period == 0)


def complete(
    table: Table, layout: TableSizes, counters: Counters, begun_at: Array, xp: Any
) -> Array:
    """Number of items per stream [E] whose windows are complete.

    An item is complete when its last row is there, or when its episode has ended.
    """
    items = table.items
    if isinstance(items, Transitions):  # every row since the last episode's end has started one
        return xp.maximum(counters.ended, counters.begun - items.steps)
    # Items started before this row have all their rows.
    latest = (counters.cursor - (layout.window - 1) * layout.envs) % layout.lane
    return xp.maximum(counters.ended, begun_at[latest])


def oldest(
    layout: TableSizes,
    counters: Counters,
    high: Array,
    begun_at: Array,
    frame_begun: Array,
    xp: Any,
) -> Array:
    """Number of each stream's oldest item that still has its rows and is within its share."""
    # The row at the cursor is the oldest one left: items started before it have lost rows.
    low = xp.maximum(high - layout.share, begun_at[counters.cursor])
    if layout.frames:
        # An item's first stack reaches `stack` - 1 frames back from its newest frame.
        edge = counters.frame_cursor + (layout.stack - 1) * layout.envs
        low = xp.maximum(low, frame_begun[edge % layout.frame_lane])
    return low
