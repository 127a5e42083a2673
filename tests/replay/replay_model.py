"""A replay table as plain lists: slow, obvious, and what the real tables must equal."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dovetail.replay.table import (
    Episodes,
    Fifo,
    Highest,
    Lifo,
    Prioritized,
    Selector,
    Sequences,
    Table,
    TableSizes,
    Uniform,
)


@dataclass
class Item:
    stream: int
    number: int
    start: int
    first_frame: int
    priority: float
    slot: int = -1
    serial: int = -1
    times: int = 0


@dataclass
class Stream:
    rows: list[tuple[str, Any]] = field(default_factory=list)
    """("step" or "final", the row's name) since the beginning."""
    frames: int = 0
    steps: int = 0
    begun: int = 0
    fresh: bool = True
    waiting: list[Item] = field(default_factory=list)


class Model:
    """Rows are names; an item is the names of its window."""

    def __init__(self, table: Table, layout: TableSizes) -> None:
        self.table, self.layout = table, layout
        self.streams = [Stream() for _ in range(layout.envs)]
        self.items: list[Item] = []
        self.free = list(range(layout.owned))[::-1]
        self.highest, self.added, self.removals = 1.0, 0, 0

    def insert(self, names: Any, ends: Any, valid: Any, priorities: Any, first: int) -> None:
        for start in range(0, len(names), self.layout.chunk):
            part = slice(start, start + self.layout.chunk)
            given = None if priorities is None else priorities[part]
            self._insert(names[part], ends[part], valid[part], given, first)

    def _insert(self, names: Any, ends: Any, valid: Any, priorities: Any, first: int) -> None:
        for time in range(len(names)):
            for at in range(len(names[0])):
                if valid[time][at]:
                    given = None if priorities is None else float(priorities[time][at])
                    self._step(first + at, names[time][at], ends[time][at], given)
        self._complete()

    def _step(self, number: int, name: Any, end: bool, priority: float | None) -> None:
        stream, stack = self.streams[number], self.layout.stack
        items = self.table.items
        if stream.fresh:
            stream.frames += stack - 1
        begins = stream.fresh if isinstance(items, Episodes) else True
        if isinstance(items, Sequences):
            begins = stream.steps % items.period == 0
        if begins:
            given = self.highest if priority is None else priority
            item = Item(number, stream.begun, len(stream.rows), stream.frames - stack + 1, given)
            stream.waiting.append(item)
            stream.begun += 1
        stream.rows.append(("step", name))
        stream.frames += 1
        stream.steps += 1
        stream.fresh = bool(end)
        if end:
            stream.rows.append(("final", name))
            stream.frames += 1

    def window(self, item: Item) -> tuple[list[Any], list[bool]]:
        """The names of an item's rows as far as they have meaning, and its mask."""
        rows = self.streams[item.stream].rows[item.start : item.start + self.layout.window]
        if not self.table.items.cut:
            return rows, [kind == "step" for kind, _ in rows]
        for at, (kind, _) in enumerate(rows):
            if kind == "final":
                return rows[: at + 1], [True] * at + [False] * (self.layout.window - at)
        return rows, [True] * (self.layout.window - 1) + [False]

    def _is_complete(self, item: Item) -> bool:
        rows = self.streams[item.stream].rows[item.start :]
        ended = self.table.items.cut and any(kind == "final" for kind, _ in rows)
        return ended or len(rows) >= self.layout.window

    def _complete(self) -> None:
        new: list[list[Item]] = []
        for stream in self.streams:
            done = [item for item in stream.waiting if self._is_complete(item)]
            stream.waiting = stream.waiting[len(done) :]
            new.append(done)
        if self.table.shared:
            complete = [stream.begun - len(stream.waiting) for stream in self.streams]
            self.items = [i for i in self.items if self._remains(i, complete[i.stream])]
            new = [[i for i in done if self._remains(i, complete[i.stream])] for done in new]
        for age in range(max(map(len, new))):
            for done in new:
                if age < len(done):
                    self._add(done[age])

    def _remains(self, item: Item, complete: int) -> bool:
        stream = self.streams[item.stream]
        framed = not self.layout.frames or item.first_frame >= stream.frames - self.layout.frames
        has_rows = item.start >= len(stream.rows) - self.layout.rows
        return item.number >= complete - self.layout.share and has_rows and framed

    def _add(self, item: Item) -> None:
        if self.table.shared:
            item.slot = item.number % self.layout.slots * self.layout.envs + item.stream
        else:
            if not self.free:
                victim = self._victim()
                self.items.remove(victim)
                self.free.append(victim.slot)
            item.slot = self.free.pop()
        item.serial = self.added
        self.added += 1
        self.items.append(item)

    def _victim(self) -> Item:
        self.removals += 1
        remover = self.table.remover
        if not isinstance(remover, Uniform | Prioritized):
            return self._in_order(remover)[0]
        target = scattered(self.removals - 1) * sum(self._weight(remover, i) for i in self.items)
        return self._at(remover, target)

    def _weight(self, selector: Selector, item: Item) -> float:
        return item.priority**selector.exponent if isinstance(selector, Prioritized) else 1.0

    def _at(self, selector: Selector, target: float) -> Item:
        for item in sorted(self.items, key=lambda item: item.slot):
            target -= self._weight(selector, item)
            if target < 0:
                return item
        raise AssertionError("beyond the total")

    def _in_order(self, selector: Selector) -> list[Item]:
        def rank(item: Item) -> tuple[float, float]:
            if isinstance(selector, Fifo):
                return item.serial, 0
            if isinstance(selector, Lifo):
                return -item.serial, 0
            high = isinstance(selector, Highest)
            return -item.priority if high else item.priority, item.serial

        return sorted(self.items, key=rank)

    def sample(self, draws: Any) -> list[tuple[Item, float, int]]:
        """The items of a batch, their probabilities, and how often they had been sampled."""
        sampler, count = self.table.sampler, len(draws)
        if self.table.ranged:
            order = sorted(self.items, key=lambda item: (item.stream, item.number))
            chosen = [order[int(draw * len(order))] for draw in draws]
            weights = [1 / len(order)] * count
        elif isinstance(sampler, Uniform | Prioritized):
            total = sum(self._weight(sampler, item) for item in self.items)
            stratified = isinstance(sampler, Prioritized)
            targets = [(at + u) / count if stratified else u for at, u in enumerate(draws)]
            chosen = [self._at(sampler, target * total) for target in targets]
            weights = [self._weight(sampler, item) / total for item in chosen]
        else:
            order = self._in_order(sampler)
            chosen = [order[at % len(order)] for at in range(count)]
            weights = [1.0] * count
        result = [(i, w, i.times) for i, w in zip(chosen, weights, strict=True)]
        for item in chosen:
            item.times += 1
        most = self.table.max_times_sampled
        if most is not None:
            spent = sorted({i.slot for i in chosen if i.times >= most})
            self.items = [item for item in self.items if item.slot not in spent]
            self.free += [] if self.table.shared else spent
        return result

    def update(self, items: list[Item], priorities: Any) -> None:
        for item, priority in zip(items, priorities, strict=True):
            if any(item is kept for kept in self.items):
                item.priority = float(priority)
        self.highest = max(self.highest, float(np.max(priorities)))

    @property
    def ready(self) -> bool:
        return bool(self.items)

    def note(self, priorities: Any) -> None:
        if priorities is not None:
            self.highest = max(self.highest, float(np.max(priorities)))


class ShardedModel:
    """Several tables as one: streams in order, and of every batch a part from each."""

    def __init__(self, table: Table, layouts: list[TableSizes]) -> None:
        self.shards = [Model(table, layout) for layout in layouts]
        self._homes: dict[int, tuple[Item, Model]] = {}

    @property
    def items(self) -> list[Item]:
        return [item for shard in self.shards for item in shard.items]

    @property
    def ready(self) -> bool:
        return all(shard.items for shard in self.shards)

    @property
    def streams(self) -> list[Stream]:
        return [stream for shard in self.shards for stream in shard.streams]

    def note(self, priorities: Any) -> None:
        """Each shard notes its own."""

    def insert(self, names: Any, ends: Any, valid: Any, priorities: Any, first: int) -> None:
        begin, last = 0, first + len(names[0])
        for shard in self.shards:
            low, high = max(first, begin), min(last, begin + shard.layout.envs)
            if low < high:
                here = slice(low - first, high - first)
                given = None if priorities is None else priorities[:, here]
                shard.note(given)
                name, end, there = ([row[here] for row in x] for x in (names, ends, valid))
                shard.insert(name, end, there, given, low - begin)
            begin += shard.layout.envs

    def sample(self, draws: Any) -> list[tuple[Item, float, int]]:
        bounds = [len(draws) * at // len(self.shards) for at in range(len(self.shards) + 1)]
        found: list[tuple[Item, float, int]] = []
        for shard, first, last in zip(self.shards, bounds, bounds[1:], strict=False):
            for item, weight, times in shard.sample(draws[first:last]):
                self._homes[id(item)] = (item, shard)
                found.append((item, weight * (last - first) / len(draws), times))
        return found

    def window(self, item: Item) -> tuple[list[Any], list[bool]]:
        return self._homes[id(item)][1].window(item)

    def update(self, items: list[Item], priorities: Any) -> None:
        for shard in self.shards:
            here = [at for at, item in enumerate(items) if self._homes[id(item)][1] is shard]
            if here:
                shard.update([items[at] for at in here], [priorities[at] for at in here])


def scattered(count: int) -> float:
    """The finalizer of MurmurHash3, with Python's integers."""
    x = ((count + 1) * 0x9E3779B9) % 2**32
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) % 2**32
    return ((x ^ (x >> 16)) >> 8) / 2**24
