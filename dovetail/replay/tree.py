"""Sum trees: sampling in proportion to weights, in time logarithmic in the capacity.

A node has `FAN` children, so five levels hold a million weights, and each level of a whole batch is
one gather, one small matrix product and one comparison. The host tree sums in float64; the device
tree in float32, which still resolves a million weights.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import jax

FAN = 16
"""Children per node."""
SHIFT = 4
"""log2(FAN)."""
TOP = 8192
"""Maximum number of nodes at the top level, which is searched in one call."""
BLOCK = 32
"""Top-level nodes that are summed at a time."""
FEW = 64
"""Maximum number of top-level nodes on the device, where they are compared one by one."""

Weights = np.ndarray[Any, np.dtype[np.float64]]
Slots = np.ndarray[Any, np.dtype[np.int64]]


def level_sizes(size: int, top: int) -> list[int]:
    """Nodes per level from the leaves up, padded to multiples of `FAN` except at the top."""
    sizes = [max(size, 1)]
    while sizes[-1] > top:
        sizes[-1] = -(-sizes[-1] // FAN) * FAN
        sizes.append(sizes[-1] // FAN)
    return sizes


class HostTree:
    """A sum tree in numpy; sums are refreshed lazily, when they are next needed.

    A node's sum depends on its children alone, not on which nodes are refreshed together, so a
    table that was saved and loaded makes exactly the choices it would have made.
    """

    def __init__(self, size: int) -> None:
        *lower, top = level_sizes(size, TOP)
        self.levels = [np.zeros(n) for n in (*lower, -(-top // BLOCK) * BLOCK)]
        self.leaves = self.levels[0]
        self._stale: list[Slots] = []
        self._stale_count = 0
        self._cumulative = np.zeros(self.levels[-1].size)
        self._first = self._numbers = np.zeros(0, np.int64)
        self._lower = np.tril(np.ones((FAN, FAN)))
        self._upper = np.triu(np.ones((BLOCK, BLOCK)))

    def set(self, slots: Slots, weights: Weights | float) -> None:
        """Sets the weights of leaves."""
        self.leaves[slots] = weights
        self._stale.append(slots)
        self._stale_count += slots.size

    @property
    def total(self) -> float:
        """The sum of all weights."""
        self._refresh()
        return float(self._cumulative[-1])

    def _refresh(self) -> None:
        """Recomputes the sums above the leaves that were set since the last call."""
        if not self._stale:
            return
        # With this many stale leaves, recomputing every level is cheaper than gathering families.
        whole = self._stale_count >= self.leaves.size // FAN
        one = len(self._stale) == 1
        nodes = None if whole else self._stale[0] if one else np.concatenate(self._stale)
        self._stale.clear()
        self._stale_count = 0
        for lower, upper in zip(self.levels, self.levels[1:], strict=False):
            families = lower.reshape(-1, FAN)
            if nodes is None:
                # `einsum` sums each row in the same order whether the rows come together or alone.
                np.einsum("ij->i", families, out=upper[: len(families)])
            else:
                nodes = nodes >> SHIFT
                upper[nodes] = np.einsum("ij->i", families.take(nodes, axis=0))
        blocks = self.levels[-1].reshape(-1, BLOCK) @ self._upper  # faster than one long sum
        blocks[1:] += np.cumsum(blocks[:-1, -1])[:, None]
        self._cumulative = blocks.reshape(-1)

    def find(self, targets: Weights) -> Slots:
        """The leaf whose interval of the cumulative sum contains each target; needs a weight >
        0."""
        self._refresh()
        # Rounding may push a target up to the total, past the last leaf.
        targets = np.minimum(targets, self._cumulative[-1] * BELOW)
        found = self._cumulative.searchsorted(targets, side="right")
        # The remainder within the node: what its left neighbors sum to is passed.
        targets -= self._cumulative.take(found) - self.levels[-1].take(found)
        if self._first.size != targets.size:
            self._first = np.arange(0, targets.size * FAN, FAN)
            self._numbers = np.arange(targets.size)
        for depth, level in enumerate(reversed(self.levels[:-1]), start=1):
            family = level.reshape(-1, FAN).take(found, axis=0)
            running = self._lower @ family.T  # [FAN, n]: later operations run along the batch
            # The children's sum may differ from the parent's by rounding: stay within the family.
            np.minimum(targets, running[-1] * BELOW, out=targets)
            # The number of running sums that a target has passed is the index of its child.
            passed = (running <= targets).view(np.uint8)
            child = np.add.reduce(passed, axis=0, dtype=np.uint8).astype(np.int64)
            # At the leaves the remainder is not needed.
            if depth < len(self.levels) - 1:
                reached = running.take(child * targets.size + self._numbers)
                targets -= reached - family.take(self._first + child)
            found *= FAN
            found += child
        return found


BELOW = 1 - 2.0**-52
"""Just below 1: keeps a target strictly below the total despite rounding."""
DEVICE_BELOW = float(1 - 2.0**-23)

DeviceTree = tuple[Any, ...]
"""The levels of a sum tree on the device, leaves first, each [n, FAN]; the top is a single row.
They are stored in this shape because XLA copies an array that is read in one shape and written in
another."""


def device_tree(size: int) -> DeviceTree:
    """A tree of `size` leaves with all weights zero."""
    import jax.numpy as jnp

    *levels, top = level_sizes(size, FEW)
    return (*(jnp.zeros((n // FAN, FAN)) for n in levels), jnp.zeros((1, top)))


def set_weights(
    tree: DeviceTree, slots: "jax.Array", weights: "jax.Array", cleared: "jax.Array"
) -> DeviceTree:
    """The tree with the `cleared` leaves set to zero, then `slots` set to `weights`; indices past
    the leaves are dropped."""
    import jax.numpy as jnp

    leaves, *uppers = tree
    width = leaves.shape[1]
    leaves = leaves.at[cleared // width, cleared % width].set(0, mode="drop")
    levels = [leaves.at[slots // width, slots % width].set(weights, mode="drop")]
    # The parents whose sums change; a parent named twice is computed twice, with the same result.
    nodes = jnp.concatenate([cleared, slots]) // width
    for upper in uppers:
        width = upper.shape[1]
        # Indices past the leaves read some node here, but are dropped when it is written.
        sums = levels[-1].at[nodes].get(mode="clip").sum(axis=1)
        levels.append(upper.at[nodes // width, nodes % width].set(sums, mode="drop"))
        nodes = nodes // width
    return tuple(levels)


def tree_total(tree: DeviceTree) -> "jax.Array":
    """The sum of all weights."""
    return tree[-1].sum()


def find_leaves(tree: DeviceTree, targets: "jax.Array") -> "tuple[jax.Array, jax.Array]":
    """The leaf whose interval of the cumulative sum contains each target, and its weight.

    `targets` [n] lie in [0, total). All targets descend one level at a time.
    """
    import jax.numpy as jnp

    found = jnp.zeros(targets.shape, jnp.int32)
    weight = jnp.zeros(targets.shape)
    for level in reversed(tree):
        family = level[found]
        width = level.shape[1]
        sums = jnp.triu(jnp.ones((width, width), family.dtype))
        # A cumulative sum as a matrix product; accelerators default to a lower precision.
        running = jnp.matmul(family, sums, precision="highest")
        # Rounding may leave a target slightly outside the family.
        targets = jnp.clip(targets, 0, running[:, -1] * DEVICE_BELOW)
        child = jnp.argmax(running > targets[:, None], axis=1).astype(jnp.int32)
        weight = jnp.take_along_axis(family, child[:, None], axis=1)[:, 0]
        reached = jnp.take_along_axis(running, child[:, None], axis=1)[:, 0]
        targets, found = targets - (reached - weight), found * width + child
    return found, weight
