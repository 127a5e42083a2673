"""The result of `sample`, and the importance weights computed from it."""

from collections.abc import Callable
from typing import Any, NamedTuple

Array = Any
"""A numpy or JAX array."""


def _same(array: Array) -> Array:
    return array


class ItemKeys(NamedTuple):
    """Identifies sampled items; the key of an item that has since left matches no other item."""

    slot: Array
    """Slot of each item [n]."""
    number: Array
    """Generation of each slot [n]: tells successive items of one slot apart."""


class Sample(NamedTuple):
    """Items of a table, batch axis first."""

    rows: Any
    """Rows of each item's window [n, W, …]."""
    mask: Array
    """Which rows are steps of the item [n, W]. The row after the last step is its successor; later
    rows are undefined."""
    keys: ItemKeys
    """For `update_priorities`."""
    probabilities: Array
    """Probability of each item under one draw [n]; 1 for deterministic samplers."""
    size: Array
    """Number of items in the table at that time."""
    times: Array
    """How often each item had been sampled before [n]."""


def importance_weights(
    probabilities: Array, size: Array, exponent: float, over: Callable[[Array], Array] = _same
) -> Array:
    """(size × probability) ** -exponent, divided by the largest in the batch: section 3.4 of
    https://arxiv.org/abs/1511.05952. A learner copy that holds only part of the batch passes
    `over=rl.max` to take the maximum over the whole batch."""
    weights = (size * probabilities) ** -exponent
    # At most 1, so that weights only ever shrink an update.
    return weights / over(weights.max())
