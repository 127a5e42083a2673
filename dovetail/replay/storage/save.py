"""Saves a host table as a dictionary of arrays, and loads it: for checkpoints."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dovetail.errors import UserError
from dovetail.replay.host.compressed import Compressed, Store
from dovetail.replay.host.frames import HostFrames
from dovetail.replay.host.mapped import Mapped
from dovetail.replay.host.packed import PackedRows
from dovetail.replay.host.table import HostTable

Array = np.ndarray[Any, np.dtype[Any]]


def save(table: HostTable, whole: bool = True) -> dict[str, Array]:
    """A copy of a table's contents; a table loaded from it continues identically. Unless `whole`,
    mapped rows are represented by their check sums alone."""
    table.settle()
    saved = {name: array.copy() for name, array in _arrays(table, whole).items()}
    saved["numbers"] = np.array(_numbers(table))
    for name, store in _compressed(table).items():
        saved[f"{name}/lengths"], saved[f"{name}/data"] = store.save()
    return saved


def check_saved(table: HostTable, saved: Mapping[str, Array], whole: bool = True) -> None:
    """Raises if a saved state has different options or rows."""
    arrays, compressed = _arrays(table, whole), _compressed(table)
    wanted = {name: (x.shape, x.dtype) for name, x in arrays.items()}
    wanted["numbers"] = ((5,), np.dtype(np.float64))
    own = {f"{name}/data" for name in compressed}  # of any length
    found = {name: (x.shape, x.dtype) for name, x in saved.items() if name not in own}
    for name, store in compressed.items():
        wanted[f"{name}/lengths"] = ((store.shape[0],), np.dtype(np.int64))
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise UserError(
                f"The saved replay table has {_described(found.get(name))} as {name}, and this one "
                f"{_described(wanted.get(name))}: load it with the options it was saved with."
            )


def load(table: HostTable, saved: Mapping[str, Array], whole: bool = True) -> None:
    """Restores a table from a saved state of the same options and rows."""
    check_saved(table, saved, whole)
    arrays, compressed = _arrays(table, whole), _compressed(table)
    for name, array in arrays.items():
        array[...] = saved[name]
    for store in [*table.streams.rows.alone.values(), *table.streams.frames.stores]:
        if isinstance(store, Mapped) and whole:
            store.loaded()
    for name, store in compressed.items():
        store.load(saved[f"{name}/lengths"], saved[f"{name}/data"])
    if table.streams.budget is not None:
        table.streams.budget.loaded()
    highest, *counts = saved["numbers"].tolist()
    table.highest = highest
    numbers = [int(x) for x in counts]
    if table.index is not None:
        table.index.count, table.index.added, table.index.removals = numbers[:3]
        table.index.weigh_all()
    if table.owned is not None:
        table.owned.num_free = numbers[3]
    table.unsettle()


def _described(found: tuple[Any, Any] | None) -> str:
    return "nothing" if found is None else f"{np.dtype(found[1]).name}{list(found[0])}"


def _numbers(table: HostTable) -> list[float]:
    index, owned = table.index, table.owned
    counts = [0, 0, 0] if index is None else [index.count, index.added, index.removals]
    return [table.highest, *map(float, counts), 0.0 if owned is None else float(owned.num_free)]


def _arrays(table: HostTable, whole: bool) -> dict[str, Array]:
    """A table's arrays by name; not copies."""
    streams, index, owned = table.streams, table.index, table.owned
    found: dict[str, Array] = {
        "begun_at": streams.begun_at,
        "frame_at": streams.frame_at,
        "frame_begun": streams.frame_begun,
        "starts": streams.starts,
        "given": streams.given,
        "times": streams.times,
        "heads": streams.heads,
        "low": table.low,
        "high": table.high,
    }
    counters = streams.counters._asdict()
    found |= {f"counters/{name}": x for name, x in counters.items() if name != "cursor"}
    found |= _stored("rows", streams.rows, streams.frames, whole)
    if index is not None:
        found |= {
            "index/live": index.live,
            "index/priority": index.priority,
            "index/serial": index.serial,
            "index/times": index.times,
        }
    if streams.budget is not None:
        budget = streams.budget
        found |= {"budget/floor": budget.floor}
        found |= {"budget/written": budget.written, "budget/kept": budget.kept}
    if owned is not None:
        found |= {"owned/free": owned.free, **_stored("owned", owned.rows, owned.frames, whole)}
    return found


def _stored(name: str, rows: PackedRows, frames: HostFrames, whole: bool) -> dict[str, Array]:
    found = {f"{name}/block": rows.block}
    for name_of, store in _stores(name, rows, frames).items():
        if isinstance(store, Mapped):
            found |= {name_of: store.array} if whole else {f"{name_of}/sums": store.sums}
        elif not isinstance(store, Compressed):
            found[name_of] = store
    return found


def _stores(name: str, rows: PackedRows, frames: HostFrames) -> dict[str, Store]:
    found: dict[str, Store] = {f"{name}/leaf {at}": x for at, x in rows.alone.items()}
    return found | {f"{name}/frames {at}": x for at, x in enumerate(frames.stores)}


def _compressed(table: HostTable) -> dict[str, Compressed]:
    """The compressed stores, by name."""
    streams, owned = table.streams, table.owned
    found = _stores("rows", streams.rows, streams.frames)
    if owned is not None:
        found |= _stores("owned", owned.rows, owned.frames)
    return {name: store for name, store in found.items() if isinstance(store, Compressed)}
