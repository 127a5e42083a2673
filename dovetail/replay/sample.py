"""What `sample` gives, and the importance weights made of it."""

from typing import Any, NamedTuple

Array = Any
"""An array of numpy or of JAX."""


class Keys(NamedTuple):
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
    keys: Keys
    """For `update_priorities`."""
    probabilities: Array
    """The probability of each item to be chosen by one draw [n]; 1 where nothing is left to
    chance."""
    size: Array
    """Items in the table at that time."""
    times: Array
    """How often each item had been sampled before [n]."""


def importance_weights(probabilities: Array, size: Array, exponent: float) -> Array:
    """(size × probability) ** -exponent, divided by the largest of the batch: section 3.4 of
    https://arxiv.org/abs/1511.05952."""
    weights = (size * probabilities) ** -exponent
    return weights / weights.max()
