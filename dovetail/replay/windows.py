"""Where inserted rows go, which items they begin, and which items of a stream can be sampled.

Arithmetic on counters, written once for numpy and jax.numpy (`xp`), so that the tables on the host
and on the device agree by construction. Rings are time-major: row `r` of stream `e` is at
r × envs + e, modulo the ring's flat size, so the next row of a stream is always `envs` further on.
"""

from types import ModuleType
from typing import Any, NamedTuple

from dovetail.replay.table import Episodes, Sequences, Table, TableSizes, Transitions

Array = Any
"""An array of numpy or of JAX."""

DROP = 1 << 30
"""A place beyond every array: what would be written there is dropped."""


class Counters(NamedTuple):
    """What is counted of each stream [E]."""

    cursor: Array
    """Where the next row goes: flat, in the rings of rows."""
    frame_cursor: Array
    """Where the next frame goes; stays 0 without a history."""
    begun: Array
    """Items that have begun."""
    ended: Array
    """Items that had begun when the last episode ended; 0 where items may cross ends."""
    steps: Array
    """Steps so far, modulo the period at which sequences begin; else 0."""
    fresh: Array
    """Whether the next step begins an episode."""


class InsertPlan(NamedTuple):
    """Where the rows of an insert go [T, B]; `DROP` where there is none."""

    step_at: Array
    """Ring place of each step."""
    final_at: Array
    """Ring place of the row behind each step that ends an episode."""
    item_at: Array
    """Slot of the item that begins with the step."""
    number: Array
    """Items that had begun before the step."""
    after: Array
    """Items that have begun with the step."""
    step_frame: Array
    """Place of each step's newest frame; with a history only."""
    final_frame: Array
    """Place of each final row's newest frame; with a history only."""
    leads: Array
    """Whether the step begins an episode, so that its older frames are stored before it."""


def make_plan(
    xp: ModuleType,
    table: Table,
    layout: TableSizes,
    counters: Counters,
    streams: Array,
    ends: Array,
    valid: Array,
) -> tuple[InsertPlan, Counters]:
    """The places of an insert's rows [T, B], and the counters [B] after it."""
    envs, lane = layout.envs, layout.lane
    step = valid.astype(counters.begun.dtype)
    final = (valid & ends).astype(step.dtype)
    width = step + final
    at = counters.cursor + (xp.cumsum(width, axis=0) - width) * envs
    fresh, fresh_after = episode_starts(xp, valid, valid & ends, counters.fresh)
    begins = item_begins(xp, table, counters.steps, step, fresh)
    after = counters.begun + xp.cumsum(begins, axis=0, dtype=step.dtype)
    number = after - begins
    leads = step * fresh
    frame_width = width + (layout.stack - 1) * leads
    frame = counters.frame_cursor + (xp.cumsum(frame_width, axis=0) - frame_width) * envs
    newest = frame + (layout.stack - 1) * envs * leads
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
    """Whether an episode begins at each step [T, B], and with the next step after all [B]."""
    rows = [fresh]
    for time in range(valid.shape[0] if valid.shape[0] <= UNROLLED else 0):
        rows.append(xp.where(valid[time], final[time], rows[-1]))
    if len(rows) > 1:
        return xp.stack(rows[:-1]), rows[-1]
    times = xp.arange(1, valid.shape[0] + 1)[:, None]
    last = running_max(xp, xp.where(valid, times, 0))  # the last step until each, from 1; 0: none
    known = xp.concatenate([fresh[None], final])
    state = xp.take_along_axis(known, last, axis=0)
    return xp.concatenate([fresh[None], state[:-1]]), state[-1]


UNROLLED = 4
"""Up to so many steps the recurrence over time is written out."""


def running_max(xp: ModuleType, values: Array) -> Array:
    """The largest value so far, along the first axis."""
    if xp.__name__ == "numpy":
        return xp.maximum.accumulate(values, axis=0)
    from jax import lax

    return lax.cummax(values, axis=0)


def item_begins(xp: ModuleType, table: Table, steps: Array, step: Array, fresh: Array) -> Array:
    """1 where a step begins an item [T, B]."""
    items = table.items
    if isinstance(items, Transitions):
        return step
    if isinstance(items, Episodes):
        return step * fresh
    count = steps + xp.cumsum(step, axis=0, dtype=step.dtype) - step
    return step * (count % items.period == 0)


def complete(
    table: Table, layout: TableSizes, counters: Counters, begun_at: Array, xp: Any
) -> Array:
    """The number of items of each stream whose windows are complete."""
    items = table.items
    if isinstance(items, Transitions):  # every row since the last end has begun one
        return xp.maximum(counters.ended, counters.begun - items.steps)
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
    """The number of each stream's first item that is still there: its rows and its share."""
    low = xp.maximum(high - layout.share, begun_at[counters.cursor])
    if layout.frames:
        edge = counters.frame_cursor + (layout.stack - 1) * layout.envs
        low = xp.maximum(low, frame_begun[edge % layout.frame_lane])
    return low
