"""What `sample` gives, and the importance weights made of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

Array = Any
"""An array of numpy or of JAX."""


def _same(array: Array) -> Array:
    return array


class ItemKeys(NamedTuple):
    """Which items were sampled: a key of an item that has left since matches no other item."""

    slot: Array
    """Where the item is kept [n]."""
    number: Array
    """Which of the items that were kept there it is [n]."""


class Sample(NamedTuple):
    """Items of a table, the batch axis first."""

    rows: Any
    """The rows of each item's window [n, W, …]."""
    mask: Array
    """Which of them are steps of the item [n, W]. The row behind the last step shows what was seen
    after it; further rows have no meaning."""
    keys: ItemKeys
    """For `update_priorities`."""
    probabilities: Array
    """The probability of each item to be chosen by one draw [n]; 1 where nothing is left to
    chance."""
    size: Array
    """Items in the table at that time."""
    times: Array
    """How often each item had been sampled before [n]."""


def importance_weights(
    probabilities: Array, size: Array, exponent: float, over: Callable[[Array], Array] = _same
) -> Array:
    """(size × probability) ** -exponent, divided by the largest of the batch: section 3.4 of
    https://arxiv.org/abs/1511.05952. A learner replica, which has a part of the batch, finds the
    largest of the whole by `over=rl.max`."""
    weights = (size * probabilities) ** -exponent
    return weights / over(weights.max())
