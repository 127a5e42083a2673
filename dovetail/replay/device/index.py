"""Which items are there, and which is chosen next: the index of a table on the device.

The same as `host_index`, as pure functions over a state of arrays. Choices in order (oldest,
highest, …) sort all items; random ones cost the logarithm of their number.
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
    """One for each random selector, the sampler's first."""


def selectors(table: Table) -> list[Selector]:
    """The random selectors, each once."""
    used = [table.sampler, *([] if table.shared else [table.remover])]
    return [s for s in dict.fromkeys(used) if isinstance(s, Uniform | Prioritized)]


def init_index(table: Table, size: int) -> DeviceIndex:
    """An index without items."""
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
    """The trees without the weights of items that `left`, and with those of others."""
    trees: list[DeviceTree] = []
    for selector, tree in zip(selectors(table), index.trees, strict=True):
        weights = priorities ** table.exponent(selector)
        trees.append(set_weights(tree, slots, weights, left))
    return tuple(trees)


def exchange(
    table: Table, index: DeviceIndex, left: jax.Array, new: jax.Array, priorities: jax.Array
) -> DeviceIndex:
    """Items leave, each named once, and new ones come, in the order of their age.

    The slot `DROP` names none, and who has left already is no matter. Both in one step, so that
    the trees are summed once.
    """
    there = index.live.at[left].get(mode="fill", fill_value=False)
    left = jnp.where(there, left, DROP)
    real = new != DROP
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
    """Other priorities for items that are still there; what is no priority changes nothing."""
    there = index.live[slots] & (index.serial[slots] == number)
    there &= (priorities >= 0) & (priorities < jnp.inf)
    slots = jnp.where(there, slots, DROP)
    index = index._replace(priority=index.priority.at[slots].set(priorities, mode="drop"))
    kept = index.priority.at[slots].get(mode="clip")  # of two for one item, the last
    return index._replace(trees=weigh(table, index, slots, kept, NONE))


def choose(
    table: Table, index: DeviceIndex, draws: jax.Array, strata: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The slots of a batch of items, and the probability of each."""
    count, sampler = draws.shape[0], table.sampler
    if not isinstance(sampler, Uniform | Prioritized):
        order = in_order(index, sampler)
        ranks = jnp.arange(count) % jnp.maximum(index.size, 1)
        return order[ranks].astype(jnp.int32), jnp.ones(count, jnp.float32)
    tree = index.trees[0]
    total = tree_total(tree)
    if isinstance(sampler, Prioritized):
        targets = (strata + draws) * (total / count)
    else:
        targets = draws * total
    slots, weights = find_leaves(tree, targets)
    return jnp.minimum(slots, index.live.size - 1), weights / total


def sampled(
    table: Table, index: DeviceIndex, slots: jax.Array
) -> tuple[DeviceIndex, jax.Array, jax.Array]:
    """Counts a batch, and lets those go that have been sampled often enough: the index, the slots
    that are free now (each once, else `DROP`), the counts before."""
    before = index.times[slots]
    index = index._replace(times=index.times.at[slots].add(1))
    most = table.max_times_sampled
    if most is None:
        return index, jnp.full(slots.shape, DROP), before
    ordered = jnp.sort(slots)
    again = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] == ordered[:-1]])
    spent = jnp.where(again | (index.times[ordered] < most), DROP, ordered)
    return exchange(table, index, spent, NONE, jnp.zeros(0)), spent, before


def in_order(index: DeviceIndex, selector: Selector) -> jax.Array:
    """All slots in the order of a selector, those without an item last."""
    gone = ~index.live
    if isinstance(selector, Fifo):
        return jnp.lexsort((index.serial, gone))
    if isinstance(selector, Lifo):
        return jnp.lexsort((-index.serial, gone))
    sign = -1 if isinstance(selector, Highest) else 1
    return jnp.lexsort((index.serial, sign * index.priority, gone))


def victim(table: Table, index: DeviceIndex) -> jax.Array:
    """The slot of the item that makes room for another."""
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
    return jnp.where(total > 0, found[0], first)


def scattered(count: jax.Array) -> jax.Array:
    """A number in [0, 1) for each count, as `host_index.scattered`."""
    x = (count.astype(jnp.uint32) + 1) * jnp.uint32(0x9E3779B9)
    x = (x ^ x >> 16) * jnp.uint32(0x85EBCA6B)
    x = (x ^ x >> 13) * jnp.uint32(0xC2B2AE35)
    return ((x ^ x >> 16) >> 8).astype(jnp.float32) / 2.0**24
