"""The index of a device table: which items exist, and which is selected next.

The same as `host/index.py`, as pure functions over a state of arrays. Ordered selection (oldest,
highest, …) sorts all items; random selection takes logarithmic time.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.replay.table import Fifo, Highest, Lifo, Lowest, Prioritized, Selector, Table, Uniform
from dovetail.replay.tree import (
    DeviceTree,
    device_tree,
    find_leaves,
    set_weights,
    tree_total,
)
from dovetail.replay.windows import DROP


class DeviceIndex(NamedTuple):
    """The items of a table by slot."""

    live: jax.Array
    priority: jax.Array
    serial: jax.Array
    times: jax.Array
    size: jax.Array
    added: jax.Array
    removals: jax.Array
    trees: tuple[DeviceTree, ...]
    """One per random selector, the sampler's first."""


def selectors(table: Table) -> list[Selector]:
    """The distinct random selectors."""
    used = [table.sampler, *([] if table.shared else [table.remover])]
    return [s for s in dict.fromkeys(used) if isinstance(s, Uniform | Prioritized)]


def init_index(table: Table, size: int) -> DeviceIndex:
    """An empty index."""
    return DeviceIndex(
        live=jnp.zeros(size, bool),
        priority=jnp.zeros(size, jnp.float32),
        serial=jnp.zeros(size, jnp.int32),
        times=jnp.zeros(size, jnp.int32),
        size=jnp.zeros((), jnp.int32),
        added=jnp.zeros((), jnp.int32),
        removals=jnp.zeros((), jnp.int32),
        trees=tuple(device_tree(size) for _ in selectors(table)),
    )


NONE: Any = np.zeros(0, np.int32)


def weigh(
    table: Table, index: DeviceIndex, slots: jax.Array, priorities: jax.Array, left: jax.Array
) -> tuple[DeviceTree, ...]:
    """The trees with the weights of items that `left` removed and those of `slots` set."""
    trees: list[DeviceTree] = []
    for selector, tree in zip(selectors(table), index.trees, strict=True):
        # Only here: stored priorities stay as they were given.
        weights = priorities ** table.exponent(selector)
        trees.append(set_weights(tree, slots, weights, left))
    return tuple(trees)


def exchange(
    table: Table, index: DeviceIndex, left: jax.Array, new: jax.Array, priorities: jax.Array
) -> DeviceIndex:
    """Removes items, each named once, and adds new ones, ordered by age.

    The slot `DROP` stands for none, and items already gone are ignored. Both happen in one step, so
    that the trees are summed once.
    """
    # `DROP` is out of range and reads as not live.
    there = index.live.at[left].get(mode="fill", fill_value=False)
    left = jnp.where(there, left, DROP)
    real = new != DROP
    # Serial numbers in the order of `new`; the entries of `DROP` get one that is never written.
    order = index.added + jnp.cumsum(real, dtype=jnp.int32) - 1
    number = jnp.sum(real, dtype=jnp.int32)
    return index._replace(
        live=index.live.at[left].set(False, mode="drop").at[new].set(True, mode="drop"),
        priority=index.priority.at[new].set(priorities, mode="drop"),
        serial=index.serial.at[new].set(order, mode="drop"),
        times=index.times.at[new].set(0, mode="drop"),
        size=index.size + number - jnp.sum(there, dtype=jnp.int32),
        added=index.added + number,
        trees=weigh(table, index, new, priorities, left),
    )


def update(
    table: Table, index: DeviceIndex, slots: jax.Array, number: jax.Array, priorities: jax.Array
) -> DeviceIndex:
    """Sets the priorities of existing items; invalid priorities are ignored."""
    # An item may have left since it was sampled, and another may have its slot.
    there = index.live[slots] & (index.serial[slots] == number)
    # False for NaN as well.
    there &= (priorities >= 0) & (priorities < jnp.inf)
    slots = jnp.where(there, slots, DROP)
    index = index._replace(priority=index.priority.at[slots].set(priorities, mode="drop"))
    kept = index.priority.at[slots].get(mode="clip")  # reread: of duplicates, the last one counts
    return index._replace(trees=weigh(table, index, slots, kept, NONE))


def choose(
    table: Table, index: DeviceIndex, draws: jax.Array, strata: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The slots of a batch of items, and the probability of each."""
    count, sampler = draws.shape[0], table.sampler
    if not isinstance(sampler, Uniform | Prioritized):
        order = in_order(index, sampler)
        # A sample larger than the table begins again with the first item.
        ranks = jnp.arange(count) % jnp.maximum(index.size, 1)
        return order[ranks].astype(jnp.int32), jnp.ones(count, jnp.float32)
    tree = index.trees[0]
    total = tree_total(tree)
    if isinstance(sampler, Prioritized):
        # Stratified: each draw falls into one of n equal intervals of the total.
        targets = (strata + draws) * (total / count)
    else:
        targets = draws * total
    slots, weights = find_leaves(tree, targets)
    # An empty tree may lead to a leaf of the padding.
    return jnp.minimum(slots, index.live.size - 1), weights / total


def sampled(
    table: Table, index: DeviceIndex, slots: jax.Array
) -> tuple[DeviceIndex, jax.Array, jax.Array]:
    """Counts a batch and drops items that reached `max_times_sampled`: (index, slots now free, each
    once, otherwise `DROP`, the counts before)."""
    before = index.times[slots]
    index = index._replace(times=index.times.at[slots].add(1))
    most = table.max_times_sampled
    if most is None:
        return index, jnp.full(slots.shape, DROP), before
    # Sorted, duplicates are neighbors: an item sampled twice must leave once.
    ordered = jnp.sort(slots)
    again = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] == ordered[:-1]])
    spent = jnp.where(again | (index.times[ordered] < most), DROP, ordered)
    return exchange(table, index, spent, NONE, jnp.zeros(0)), spent, before


def in_order(index: DeviceIndex, selector: Selector) -> jax.Array:
    """All slots in a selector's order, empty ones last."""
    gone = ~index.live
    if isinstance(selector, Fifo):
        return jnp.lexsort((index.serial, gone))
    if isinstance(selector, Lifo):
        return jnp.lexsort((-index.serial, gone))
    sign = -1 if isinstance(selector, Highest) else 1
    return jnp.lexsort((index.serial, sign * index.priority, gone))


def victim(table: Table, index: DeviceIndex) -> jax.Array:
    """The slot of the item to remove next."""
    remover, infinite = table.remover, jnp.iinfo(jnp.int32).max
    among, age = index.live, index.serial
    if isinstance(remover, Lifo):
        return jnp.argmax(jnp.where(among, age, -1)).astype(jnp.int32)
    if isinstance(remover, Highest):
        among &= index.priority >= jnp.max(jnp.where(among, index.priority, -1))
    if isinstance(remover, Lowest):
        among &= index.priority <= jnp.min(jnp.where(among, index.priority, jnp.inf))
    first = jnp.argmin(jnp.where(among, age, infinite)).astype(jnp.int32)
    if not isinstance(remover, Uniform | Prioritized):
        return first
    tree = index.trees[selectors(table).index(remover)]
    total = tree_total(tree)
    found, _ = find_leaves(tree, (scattered(index.removals) * total)[None])
    # If all weights are zero, the oldest item leaves.
    return jnp.where(total > 0, found[0], first)


def scattered(count: jax.Array) -> jax.Array:
    """A hash of the count to [0, 1), equal to `host/index.py`'s."""
    # The finalizer of MurmurHash3. A counter instead of a random key keeps removals reproducible.
    x = (count.astype(jnp.uint32) + 1) * jnp.uint32(0x9E3779B9)
    x = (x ^ x >> 16) * jnp.uint32(0x85EBCA6B)
    x = (x ^ x >> 13) * jnp.uint32(0xC2B2AE35)
    # 24 bits, which a float32 holds exactly.
    return ((x ^ x >> 16) >> 8).astype(jnp.float32) / 2.0**24
