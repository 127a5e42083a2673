"""A replay table on the device: pure functions over a state of arrays, for use inside jit and scan.

    state = init(table, example, num_envs)
    state = insert(table, state, rows, ends, valid, final, priorities)
    state, sample = sample(table, state, draws)
    state = update_priorities(table, state, sample.keys, priorities)

Compiled code cannot raise, so the structure of rows is checked during tracing, and everything else
is defined: sampling an empty table returns undefined rows (`size` is 0, the mask all False), and
invalid priorities (NaN, infinite, negative) are ignored. The caller waits until `state` holds
enough items: see `size`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.errors import UserError
from dovetail.replay.device import index as device_index
from dovetail.replay.device.index import DeviceIndex, init_index
from dovetail.replay.device.rows import DeviceRows
from dovetail.replay.host.frames import Stack
from dovetail.replay.leaves import (
    RowLeaf,
    check_history,
    check_leaves,
    leaves_of,
    with_paths,
)
from dovetail.replay.sample import ItemKeys, Sample
from dovetail.replay.table import Sequences, Table, TableSizes, make_layout, owned_frames
from dovetail.replay.windows import DROP, Counters, InsertPlan, complete, make_plan, oldest


class Owned(NamedTuple):
    """Items that own their rows."""

    rows: DeviceRows
    free: jax.Array
    """Slots without an item; the last one is used next."""
    num_free: jax.Array


class State(NamedTuple):
    """The contents of a table; arrays only."""

    rows: DeviceRows
    """Rings of rows, and of frames for the leaves with a history."""
    begun_at: jax.Array
    frame_at: jax.Array
    frame_begun: jax.Array
    counters: Counters
    starts: jax.Array
    """Position of each item's first row."""
    times: jax.Array
    given: jax.Array
    """Initial priority of each item."""
    high: jax.Array
    low: jax.Array
    highest: jax.Array
    items: DeviceIndex | None
    owned: Owned | None


def init(table: Table, example: Any, num_envs: int) -> State:
    """An empty table for rows like `example` (one row, or its shapes) of `num_envs`
    environments."""
    leaves = leaves_of(example)
    check_history(leaves, table.history)
    layout = make_layout(table, leaves, num_envs)
    envs, slots = layout.envs, layout.slots * layout.envs

    def zeros(size: int = envs, dtype: Any = jnp.int32) -> jax.Array:
        """A separate array for each use, so that the state can be donated."""
        return jnp.zeros(size, dtype)

    return State(
        rows=_store(table, example, layout.lane, layout.frame_lane),
        begun_at=zeros(layout.lane),
        frame_at=zeros(layout.lane if table.history else 0),
        frame_begun=zeros(layout.frame_lane),
        counters=Counters(
            cursor=jnp.arange(envs, dtype=jnp.int32),
            frame_cursor=jnp.arange(envs, dtype=jnp.int32),
            begun=zeros(),
            ended=zeros(),
            steps=zeros(),
            fresh=jnp.ones(envs, bool),
        ),
        starts=zeros(slots),
        times=zeros(slots if table.ranged else 0),
        given=zeros(0 if table.ranged else slots, jnp.float32),
        high=zeros(),
        low=zeros(),
        highest=jnp.ones((), jnp.float32),
        items=None if table.ranged else init_index(table, layout.size),
        owned=_init_owned(table, example, layout) if layout.owned else None,
    )


def _store(table: Table, example: Any, rows: int, frames: int) -> DeviceRows:
    """Zeros for rows, and for the frames of leaves with a history."""
    stacks = _stacks(table, leaves_of(example))
    return DeviceRows.empty(example, rows, frames, {path: s.shape for path, s in stacks.items()})


def _stacks(table: Table, leaves: Sequence[RowLeaf]) -> dict[str, Stack]:
    by_path = {leaf.path: leaf for leaf in leaves}
    return {history.path: Stack(by_path[history.path], history) for history in table.history}


def _init_owned(table: Table, example: Any, layout: TableSizes) -> Owned:
    count = layout.owned
    store = _store(table, example, count * layout.window, count * owned_frames(table, layout))
    return Owned(
        rows=store,
        free=jnp.arange(count, dtype=jnp.int32)[::-1],
        num_free=jnp.int32(count),
    )


class _View(NamedTuple):
    """Values derived from the options and the shapes of a state."""

    layout: TableSizes
    leaves: tuple[RowLeaf, ...]
    stacks: dict[str, Stack]


def _view(table: Table, state: State) -> _View:
    leaves = state.rows.form.leaves
    layout = make_layout(table, leaves, state.high.shape[0])
    return _View(layout, leaves, _stacks(table, leaves))


def insert(
    table: Table,
    state: State,
    rows: Any,
    ends: Any = None,
    valid: Any = None,
    final: Any = None,
    priorities: Any = None,
    streams: Any = None,
) -> State:
    """The table with rows [T, B, …] appended to `streams` [B], environment numbers; all by default.

    The other arguments are those of `HostTable.insert`.
    """
    view = _view(table, state)
    streams = jnp.arange(view.layout.envs, dtype=jnp.int32) if streams is None else streams
    length = jax.tree.leaves(rows)[0].shape[0]
    shape = (length, streams.shape[0])
    check_leaves(view.leaves, rows, shape, "rows")
    if jax.tree.structure(rows) != state.rows.form.tree:
        raise UserError(
            "What was inserted has another structure than the table's rows: "
            "insert the type of row that the table was made with."
        )
    check_leaves(view.leaves, final, shape, "final")
    grids = [
        None if x is None else jnp.asarray(x)
        for x in (ends, jnp.ones(shape, bool) if valid is None else valid, priorities)
    ]
    # Long inserts are split, so that no part overwrites its own rows.
    for start in range(0, length, view.layout.chunk):
        part = slice(start, start + view.layout.chunk)
        cut = jax.tree.map(lambda x: x[part], (rows, grids, final))  # noqa: B023
        state = _insert(table, view, state, cut, streams)
    return state


def break_off(table: Table, state: State, where: jax.Array, streams: jax.Array) -> State:
    """Ends open episodes of `streams` [B], `where` [B] a new one starts although the last did not
    end: its environment was set up anew.

    The successor of the last rows is unknown, so they become final rows, and the items they started
    hold no step.
    """
    layout, counters = _view(table, state).layout, state.counters
    open_ones = where & ~counters.fresh[streams]
    if not table.items.cut:
        return state
    # All rows from which an item could still reach past the break.
    back = jnp.arange(1, layout.window)[:, None] * layout.envs
    places = jnp.where(open_ones, (counters.cursor[streams] - back) % layout.lane, DROP)
    ended = jnp.where(open_ones, counters.begun[streams], counters.ended[streams])
    return state._replace(
        rows=state.rows.with_final(places.ravel()),
        counters=counters._replace(
            ended=counters.ended.at[streams].set(ended),
            fresh=counters.fresh.at[streams].set(counters.fresh[streams] | open_ones),
        ),
    )


def _insert(table: Table, view: _View, state: State, cut: Any, streams: Any) -> State:
    """Inserts at most `chunk` steps."""
    rows, (ends, valid, priorities), final = cut
    layout = view.layout
    before = jax.tree.map(lambda x: x[streams], state.counters)
    ending = jnp.zeros_like(valid) if ends is None else ends
    plan, after = make_plan(jnp, table, layout, before, streams, ending, valid)
    state = _write_rows(view, state, plan, rows, final, ends is not None)
    begins = plan.item_at.ravel()
    state = state._replace(
        starts=state.starts.at[begins].set(plan.step_at.ravel(), mode="drop"),
        counters=jax.tree.map(lambda kept, new: kept.at[streams].set(new), state.counters, after),
    )
    if table.ranged:
        state = state._replace(times=state.times.at[begins].set(0, mode="drop"))
    else:
        state = _note_given(state, begins, priorities)
    return _settle(table, layout, state, valid.shape[0])


def _write_rows(
    view: _View, state: State, plan: InsertPlan, rows: Any, final: Any, ends: bool
) -> State:
    """Writes steps, and the rows after the ends of episodes."""
    finals, form = dict(with_paths(final)), state.rows.form
    places = _both(plan.step_at, plan.final_at, ends)
    numbers = _both(plan.number, plan.after, ends)
    frames = _both(plan.step_frame, plan.final_frame, ends)

    given = jax.tree.leaves(rows)
    values = [
        _both(x, finals.get(leaf.path, jnp.zeros_like(x)), ends, leaf.shape)
        for x, leaf in zip(given, form.leaves, strict=True)
    ]

    def write(store: jax.Array, i: int) -> jax.Array:
        stack, leaf = view.stacks.get(form.leaves[i].path), given[i]
        if stack is None:
            return store.at[places].set(values[i], mode="drop")
        store = store.at[frames].set(stack.frame(values[i], -1), mode="drop")
        for back, older in enumerate(_older(view.layout, plan), start=1):
            stacks = leaf.reshape(-1, *leaf.shape[2:])
            store = store.at[older].set(stack.frame(stacks, -1 - back), mode="drop")
        return store

    # `_both` puts the final rows after the steps.
    behind = jnp.arange(places.size) >= plan.step_at.size
    kept = state.rows.with_words(places, values, behind)
    alone = tuple(write(store, i) for store, i in zip(kept.alone, form.alone, strict=True))
    state = state._replace(
        rows=replace(kept, alone=alone),
        begun_at=state.begun_at.at[places].set(numbers, mode="drop"),
    )
    if not view.stacks:
        return state
    begun = state.frame_begun.at[frames].set(numbers, mode="drop")
    for older in _older(view.layout, plan):
        begun = begun.at[older].set(plan.number.ravel(), mode="drop")
    return state._replace(
        frame_at=state.frame_at.at[places].set(frames, mode="drop"), frame_begun=begun
    )


def _both(steps: Any, finals: Any, ends: bool, shape: tuple[int, ...] = ()) -> jax.Array:
    """Values of steps and of the rows after them, along one axis; only of steps if none can end."""
    parts = [x.reshape(-1, *shape) for x in ([steps, finals] if ends else [steps])]
    return jnp.concatenate(parts)


def _older(layout: TableSizes, plan: InsertPlan) -> list[jax.Array]:
    """Positions of the older frames of an episode's first stack, latest first."""
    return [
        jnp.where(
            plan.leads, (plan.step_frame - back * layout.envs) % layout.frame_lane, DROP
        ).ravel()
        for back in range(1, layout.stack)
    ]


def _note_given(state: State, begins: jax.Array, priorities: Any) -> State:
    """Stores the priorities of items that start."""
    highest, given = state.highest, jnp.broadcast_to(state.highest, begins.shape)
    if priorities is not None:
        values = priorities.ravel().astype(jnp.float32)
        good = (values >= 0) & (values < jnp.inf)
        # New items without a priority get the highest so far, so that each is sampled soon.
        highest = jnp.maximum(highest, jnp.max(jnp.where(good, values, 0)))
        given = jnp.where(good, values, highest)
    return state._replace(given=state.given.at[begins].set(given, mode="drop"), highest=highest)


def _settle(table: Table, layout: TableSizes, state: State, steps: int) -> State:
    """Determines which items are complete and which have left, after an insert of `steps` steps."""
    high = complete(table, layout, state.counters, state.begun_at, jnp)
    low = oldest(layout, state.counters, high, state.begun_at, state.frame_begun, jnp)
    period = table.items.period if isinstance(table.items, Sequences) else 1
    # Upper bound on the items completed: those started by these steps and those pending.
    most = (steps - 1) // period + 1 + table.items.pending
    if state.items is not None and layout.owned:
        state = _own(table, layout, state, _span(layout, state.high, high, most))
    elif state.items is not None:
        # Upper bound on the items pushed out: a step stores at most stack + 1 frames.
        gone = max(most, steps * (layout.stack + 1))
        left = _span(layout, state.low, jnp.minimum(low, state.high), gone)
        new = _span(layout, jnp.maximum(state.high, low), high, most)
        given = state.given.at[new].get(mode="clip")
        items = device_index.exchange(table, state.items, left, new, given)
        state = state._replace(items=items)
    return state._replace(high=high, low=low)


def _span(layout: TableSizes, start: jax.Array, end: jax.Array, most: int) -> jax.Array:
    """Slots of the items `start` … `end` - 1 of every stream, ordered by age, otherwise `DROP`."""
    numbers = start + jnp.arange(most, dtype=jnp.int32)[:, None]
    streams = jnp.arange(layout.envs, dtype=jnp.int32)
    slots = numbers % layout.slots * layout.envs + streams
    return jnp.where(numbers < end, slots, DROP).ravel()


def _own(table: Table, layout: TableSizes, state: State, slots: jax.Array) -> State:
    """Copies complete items into their own slots, one by one."""
    # Real items first, in their order: the loop runs over these only.
    # Stable: the order of the others is their age.
    order = jnp.argsort(slots == DROP, stable=True)
    slots = slots[order]

    def one(at: jax.Array, carry: tuple[Owned, DeviceIndex]) -> tuple[Owned, DeviceIndex]:
        owned, index = carry
        full = owned.num_free == 0
        spare = owned.free[jnp.maximum(owned.num_free - 1, 0)]
        # A full table reuses the slot of the item that leaves.
        target = jnp.where(full, device_index.victim(table, index), spare)
        left, given = jnp.where(full, target, DROP)[None], state.given[slots[at]][None]
        index = device_index.exchange(table, index, left, target[None], given)
        index = index._replace(removals=index.removals + full.astype(jnp.int32))
        owned = owned._replace(num_free=owned.num_free - (~full).astype(jnp.int32))
        return _copy(table, layout, state, owned, state.starts[slots[at]], target), index

    assert state.owned is not None and state.items is not None
    number = jnp.sum(slots != DROP)
    owned, index = jax.lax.fori_loop(0, number, one, (state.owned, state.items))
    return state._replace(owned=owned, items=index)


def _copy(
    table: Table,
    layout: TableSizes,
    state: State,
    owned: Owned,
    place: jax.Array,
    target: jax.Array,
) -> Owned:
    """Copies one window into its own slot."""
    places = (place + jnp.arange(layout.window) * layout.envs) % layout.lane
    frames = _frame_places(table, layout, state, places[None])[0].ravel() if layout.frames else None
    form = state.rows.form

    def write(to: jax.Array, store: jax.Array, source: Any) -> jax.Array:
        part = store[source]
        return jax.lax.dynamic_update_slice_in_dim(to, part, target * len(part), axis=0)

    stores = zip(form.alone, owned.rows.alone, state.rows.alone, strict=True)
    alone = [write(to, x, frames if i in form.frames else places) for i, to, x in stores]
    words = write(owned.rows.words, state.rows.words, places)
    return owned._replace(rows=replace(owned.rows, words=words, alone=tuple(alone)))


def _frame_places(table: Table, layout: TableSizes, state: State, places: jax.Array) -> jax.Array:
    """Positions of the frames of windows [n, W]: [n, W + k - 1], or [n, W, k] across episodes."""
    if table.items.cut:
        first = state.frame_at[places[:, 0]]
        ahead = jnp.arange(1 - layout.stack, layout.window) * layout.envs
        return (first[:, None] + ahead) % layout.frame_lane
    back = jnp.arange(1 - layout.stack, 1) * layout.envs
    return (state.frame_at[places][..., None] + back) % layout.frame_lane


def size(table: Table, state: State) -> jax.Array:
    """Number of items that can be sampled."""
    return jnp.sum(state.high - state.low) if state.items is None else state.items.size


def sample(table: Table, state: State, draws: jax.Array, batches: int = 1) -> tuple[State, Sample]:
    """Items for draws [n] from [0, 1): the same draws choose the same items. They form `batches`
    batches, one after another, each of which covers the whole range of strata."""
    each = draws.shape[0] // batches
    # Strata are dealt out to the batches in turn, so that each batch covers the whole range.
    strata = jnp.ravel(jnp.arange(each) * batches + jnp.arange(batches)[:, None])
    view = _view(table, state)
    most = view.layout.owned or view.layout.share * view.layout.envs
    if each > most:
        raise UserError(
            f"A sample of {each} items was asked of a replay table that holds {most}: "
            "give it a larger capacity, or sample fewer."
        )
    count = size(table, state)
    if state.items is None:
        slots, numbers = _choose(view.layout, state, draws, count)
        probabilities = jnp.full(draws.shape, 1 / jnp.maximum(count, 1), jnp.float32)
        times = state.times[slots]
        state = state._replace(times=state.times.at[slots].add(1))
        return state, _read(table, view, state, slots, numbers, probabilities, count, times)
    slots, probabilities = device_index.choose(table, state.items, draws, strata)
    numbers = state.items.serial[slots]
    index, spent, times = device_index.sampled(table, state.items, slots)
    read = _read(table, view, state, slots, numbers, probabilities, count, times)
    state = state._replace(items=index)
    if state.owned is not None and table.max_times_sampled is not None:
        free = spent != DROP
        # Pushes all freed slots on the stack at once.
        place = jnp.where(free, state.owned.num_free + jnp.cumsum(free) - 1, DROP)
        owned = state.owned._replace(
            free=state.owned.free.at[place].set(spent, mode="drop"),
            num_free=state.owned.num_free + jnp.sum(free, dtype=jnp.int32),
        )
        state = state._replace(owned=owned)
    return state, read


def _choose(
    layout: TableSizes, state: State, draws: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Slots and numbers of uniformly chosen items, ranked by stream, then by age."""
    counts = state.high - state.low
    totals = jnp.cumsum(counts)
    # Rounding in float32 may reach the count itself.
    ranks = jnp.minimum((draws * count).astype(jnp.int32), count - 1)
    # With few streams, comparing with all of them replaces the binary search.
    method = "compare_all" if layout.envs <= 256 else "scan_unrolled"
    streams = jnp.searchsorted(totals, ranks, side="right", method=method).astype(jnp.int32)
    numbers = ranks + (state.low - (totals - counts))[streams]
    return numbers % layout.slots * layout.envs + streams, numbers


def _read(
    table: Table,
    view: _View,
    state: State,
    slots: jax.Array,
    numbers: jax.Array,
    probabilities: jax.Array,
    count: jax.Array,
    times: jax.Array,
) -> Sample:
    """The rows of items, and their mask."""
    layout = view.layout
    if state.owned is None:
        kept = state.rows
        places = (
            state.starts[slots][:, None] + jnp.arange(layout.window) * layout.envs
        ) % layout.lane
        frames = _frame_places(table, layout, state, places) if layout.frames else None
    else:
        kept = state.owned.rows
        places = slots[:, None] * layout.window + jnp.arange(layout.window)
        width = owned_frames(table, layout)
        shape = (-1,) if table.items.cut else (layout.window, layout.stack)
        frames = (slots[:, None] * width + jnp.arange(width)).reshape(len(slots), *shape)

    def gather(store: jax.Array, i: int) -> jax.Array:
        stack = view.stacks.get(kept.form.leaves[i].path)
        if stack is None:
            return store[places]
        if not table.items.cut:
            return stack.whole(store[frames])
        steps = jnp.arange(layout.window)[:, None] + jnp.arange(layout.stack)
        return stack.whole(store[frames][:, steps])

    found, final = kept.form.unpack(kept.words[places])
    alone = zip(kept.alone, kept.form.alone, strict=True)
    found |= {i: gather(store, i) for store, i in alone}
    if table.items.cut:
        # From the first final row on nothing is a step, and the last row of a window is only a
        # successor.
        final = (jnp.cumsum(final, axis=1) > 0) | (jnp.arange(layout.window) == layout.window - 1)
    return Sample(
        rows=kept.form.tree.unflatten([found[i] for i in range(len(found))]),
        mask=~final & (count > 0),
        keys=ItemKeys(slots, numbers),
        probabilities=probabilities,
        size=count,
        times=times,
    )


def update_priorities(table: Table, state: State, keys: ItemKeys, priorities: jax.Array) -> State:
    """Sets the priorities [n] of items; items that have left are ignored."""
    if state.items is None:
        return state
    values = priorities.astype(jnp.float32)
    good = (values >= 0) & (values < jnp.inf)
    highest = jnp.maximum(state.highest, jnp.max(jnp.where(good, values, 0)))
    index = device_index.update(table, state.items, keys.slot, keys.number, values)
    return state._replace(items=index, highest=highest)
