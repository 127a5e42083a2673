"""The index of a host table: which items exist, and which is selected next.

Only tables whose items can leave out of order or differ in probability need one; a uniform FIFO
table knows its items from counters alone.
"""

from typing import Any

import numpy as np

from dovetail.errors import UserError
from dovetail.replay.host.columns import ONCE, ItemColumns
from dovetail.replay.table import Fifo, Highest, Lifo, Prioritized, Selector, Table, Uniform
from dovetail.replay.tree import HostTree, Slots

Floats = np.ndarray[Any, np.dtype[Any]]


class HostIndex:
    """The items of a table by slot: priority, age, times sampled."""

    def __init__(self, table: Table, items: ItemColumns) -> None:
        self.table = table
        self.live, self.priority = items.live, items.priority
        self.serial, self.times = items.serial, items.times
        size = self.live.size
        self._strata = np.zeros(0)
        self.count = 0
        self.added = 0
        self.removals = 0
        self.trees: dict[Selector, HostTree] = {
            selector: HostTree(size)
            for selector in {table.sampler, *(() if table.shared else (table.remover,))}
            if isinstance(selector, Uniform | Prioritized)
        }

    def add(self, slots: Slots, priorities: Floats, numbers: Slots | None = None) -> None:
        """Adds items, ordered by age; `numbers` tell items of one slot apart, independently of when
        they are added."""
        self.live[slots] = True
        self.priority[slots] = priorities
        if numbers is None:
            numbers = np.arange(self.added, self.added + slots.size)
            self.added += slots.size
        self.serial[slots] = numbers
        self.times[slots] = 0
        self.count += slots.size
        self._weigh(slots, priorities)

    def drop(self, slots: Slots) -> None:
        """Removes items; those already gone are ignored."""
        slots = slots[self.live[slots]]
        if slots.size:
            self.live[slots] = False
            self.count -= slots.size
            for tree in self.trees.values():
                tree.set(slots, 0.0)

    def update(self, slots: Slots, priorities: Floats) -> None:
        """Sets the priorities of existing items."""
        self.priority[slots] = priorities
        self._weigh(slots, self.priority[slots])  # reread: of duplicates, the last one counts

    def weigh_all(self) -> None:
        """Rebuilds the trees from the existing items."""
        for tree in self.trees.values():
            tree.set(np.arange(self.live.size), 0.0)
        slots = np.flatnonzero(self.live)
        self._weigh(slots, self.priority[slots])

    def _weigh(self, slots: Slots, priorities: Floats) -> None:
        for selector, tree in self.trees.items():
            if isinstance(selector, Prioritized):
                tree.set(slots, priorities.astype(np.float64) ** selector.exponent)
            else:
                tree.set(slots, 1.0)

    def choose(self, draws: Floats) -> tuple[Slots, Floats]:
        """The slots of a batch of items, and the probability of each."""
        sampler = self.table.sampler
        if sampler not in self.trees:
            order = self._in_order(sampler)
            return order[np.arange(draws.size) % order.size], np.ones(draws.size, np.float32)
        tree = self.trees[sampler]
        total = tree.total
        if not total > 0:
            raise UserError(
                f"All {self.count} items of the replay table have priority 0, so none can be "
                "sampled: give some a positive priority."
            )
        if isinstance(sampler, Prioritized):
            if self._strata.size != draws.size:
                self._strata = np.arange(draws.size, dtype=np.float64)
            # Stratified: draw i falls into the i-th of n equal intervals of the total.
            targets = (self._strata + draws) * (total / draws.size)
        else:
            targets = (draws * total).astype(np.float64, copy=False)
        slots = tree.find(targets)
        return slots, (tree.leaves.take(slots) / total).astype(np.float32)

    def sampled(self, slots: Slots) -> Floats:
        """Counts a batch and drops items at `max_times_sampled`; returns the counts before."""
        before = self.times[slots]
        # Unlike `+=`, `add.at` counts duplicates within a batch.
        np.add.at(self.times, slots, ONCE)
        most = self.table.max_times_sampled
        if most is not None:
            spent = np.unique(slots[self.times[slots] >= most])
            self.drop(spent)
        return before

    def _in_order(self, selector: Selector) -> Slots:
        slots = np.flatnonzero(self.live)
        return slots[np.lexsort(self._ranks(selector, slots))]

    def _ranks(self, selector: Selector, slots: Slots) -> tuple[Floats, ...]:
        serial = self.serial[slots]
        if isinstance(selector, Fifo):
            return (serial,)
        if isinstance(selector, Lifo):
            return (-serial,)
        priority = self.priority[slots]
        return (serial, -priority if isinstance(selector, Highest) else priority)

    def victim(self) -> int:
        """The slot of the item to remove next."""
        remover = self.table.remover
        tree = self.trees.get(remover)
        self.removals += 1
        if tree is not None and tree.total > 0:
            target = scattered(self.removals - 1) * tree.total
            return int(tree.find(np.array([target]))[0])
        # If all weights are zero, the oldest item leaves.
        fallback = Fifo() if tree is not None else remover
        return int(self._in_order(fallback)[0])


def scattered(count: int) -> float:
    """A hash of the count to [0, 1) (the finalizer of MurmurHash3). Random removers use it, so that
    a table needs no random generator."""
    x = (count + 1) * 0x9E3779B9 & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return ((x ^ x >> 16) >> 8) / 2.0**24
