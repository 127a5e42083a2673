"""Loads a whole dataset into a replay table on the device, to be sampled and never added to."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.data.episode import Rows
from dovetail.data.hdf5 import Array, Piece
from dovetail.data.reader import READ_BYTES, Reader
from dovetail.errors import UserError
from dovetail.replay.device import table as device
from dovetail.replay.leaves import leaves_of
from dovetail.replay.replay import DeviceReplay
from dovetail.replay.table import Table, Transitions, make_layout, stored_bytes

CHUNK = 1 << 14
"""Maximum number of steps per insert."""


def load(
    reader: Reader,
    table: Table,
    row: Callable[[Rows], Any] = lambda rows: rows,
    *,
    num_envs: int = 1,
    max_bytes: int | None = None,
) -> DeviceReplay:
    """All steps of a dataset in a table with these options; its capacity is adjusted to fit.

    `row` converts `Rows` into the table's rows. Episodes are distributed over the streams of
    `num_envs` environments. Raises if the table would need more than `max_bytes`.
    """
    plan = _shared_out(reader.episodes.lengths, num_envs)
    example = _example(reader, row)
    table = fitted(reader, table, plan)
    needed = stored_bytes(table, leaves_of(example), num_envs, table.capacity // num_envs)
    if max_bytes is not None and needed > max_bytes:
        raise UserError(
            f"The dataset {reader.folder} takes {needed / 1e6:,.0f} MB as a replay table, and "
            f"{max_bytes / 1e6:,.0f} MB are allowed: stream it from the disk instead."
        )
    replay = DeviceReplay.empty(table, example, num_envs)
    most = min(CHUNK, READ_BYTES // reader.metadata.row_bytes)
    chunk = min(most // num_envs or 1, make_layout(table, leaves_of(example), num_envs).chunk)
    # Donated, so that the table is updated in place.
    insert = jax.jit(partial(_inserted, table), donate_argnums=0)
    state = replay.state
    for rows, following, ends, valid in _grids(reader, plan, chunk):
        state = insert(state, row(rows), row(following), ends, valid)
    return replace(replay, state=state)


def fitted(reader: Reader, table: Table, plan: list[list[int]] | None = None) -> Table:
    """`table` with capacity and spare rows for the whole dataset."""
    if not isinstance(table.items, Transitions) or not table.shared:
        raise UserError(
            f"A dataset becomes a table of Transitions with the Fifo remover, not {table}: give "
            "such a one."
        )
    lengths = reader.episodes.lengths
    streams = plan or [list(range(len(lengths)))]
    longest = max(int(lengths[stream].sum()) for stream in streams)
    most = max(len(stream) for stream in streams)
    # Each stream gets an equal share of the capacity; an episode's final row needs a spare one.
    spare = max(table.spare, (most + 1) / longest + 1e-3)
    return replace(table, capacity=longest * len(streams), spare=spare)


def _inserted(
    table: Table, state: device.State, rows: Any, final: Any, ends: Any, valid: Any
) -> device.State:
    return device.insert(table, state, rows, ends=ends, valid=valid, final=final)


def _shared_out(lengths: Array, streams: int) -> list[list[int]]:
    """The episodes of each stream: the next one goes to the shortest stream."""
    if len(lengths) < streams:
        raise UserError(
            f"The dataset has {len(lengths)} episodes, but the table has {streams} environments: "
            f"take {len(lengths)} or fewer."
        )
    shortest = [(0, stream) for stream in range(streams)]
    found: list[list[int]] = [[] for _ in range(streams)]
    for episode, length in enumerate(lengths.tolist()):
        # Equal streams waste the least room: each has the same share of the table.
        steps, stream = heapq.heappop(shortest)
        found[stream].append(episode)
        heapq.heappush(shortest, (steps + length, stream))
    return found


def _example(reader: Reader, row: Callable[[Rows], Any]) -> Any:
    one = row(reader.pieces([Piece(0, 0, 1)]))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], jnp.asarray(x).dtype), one)


def _grids(
    reader: Reader, plan: list[list[int]], chunk: int
) -> Iterator[tuple[Rows, Rows, Array, Array]]:
    """(rows, successor rows, ends, valid), each [chunk, streams, …], over the whole dataset."""
    lengths = reader.episodes.lengths
    lines = [_line(stream, lengths, chunk) for stream in plan]
    while True:
        parts = [next(line, []) for line in lines]
        if not any(parts):
            return
        columns = [_column(reader, pieces, chunk) for pieces in parts]
        # Streams that have run out are padded with invalid copies of another one.
        empty = next(column for column in columns if column is not None)
        full = [_nothing(empty) if column is None else column for column in columns]
        yield jax.tree.map(lambda *x: np.stack(x, axis=1), *full)


def _line(stream: list[int], lengths: Array, chunk: int) -> Iterator[list[Piece]]:
    """A stream's steps, `chunk` at a time."""
    pieces: list[Piece] = []
    room = chunk
    for episode in stream:
        start, length = 0, int(lengths[episode])
        while start < length:
            taken = min(room, length - start)
            pieces.append(Piece(episode, start, start + taken + 1))
            start, room = start + taken, room - taken
            if room == 0:
                yield pieces
                pieces, room = [], chunk
    if pieces:
        yield pieces


def _column(
    reader: Reader, pieces: list[Piece], chunk: int
) -> tuple[Rows, Rows, Array, Array] | None:
    """One stream's part of a grid, padded to `chunk` with invalid steps."""
    if not pieces:
        return None
    rows = reader.pieces(pieces)
    sizes = np.array([piece.stop - piece.start for piece in pieces])
    behind = np.zeros(sizes.sum(), np.bool_)
    behind[np.cumsum(sizes) - 1] = True
    steps = np.flatnonzero(~behind)
    # Repeats steps to fill the chunk; `valid` excludes the repeats.
    index = np.resize(steps, chunk)
    valid = np.arange(chunk) < len(steps)
    now, following = (jax.tree.map(lambda x, i=i: x[i], rows) for i in (index, index + 1))
    return now, following, now.terminated | now.truncated, valid


def _nothing(like: tuple[Rows, Rows, Array, Array]) -> tuple[Rows, Rows, Array, Array]:
    rows, following, ends, valid = like
    return rows, following, ends, np.zeros_like(valid)
