"""Parts of a dataset that are looked at together: of whole episodes, and bounded in bytes."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dovetail.data.blocks import whole_episodes
from dovetail.data.reader import Reader

Array = np.ndarray[Any, np.dtype[Any]]

STEPS = 1 << 15
"""Rows of a part, at most, about."""
BYTES = 1 << 24
"""What the observations of a part take, at most, about; filled up, four times as much."""


def rows_at_once(reader: Reader) -> int:
    """Rows of a part."""
    leaves = jax.tree.leaves(reader.codec.observation)
    each = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return max(min(STEPS, BYTES // max(each, 1)), 1)


def parts(reader: Reader) -> Iterator[range]:
    """The episodes of each part: one at least, however long it is."""
    return whole_episodes(reader.episodes.lengths + 1, rows_at_once(reader))


def power(n: int) -> int:
    """The next power of two: sizes are rounded up to it, so that few shapes are compiled."""
    return 1 << max(n - 1, 0).bit_length()


def filled(x: Array) -> Array:
    """[n, …], with zeros behind it up to a power of two."""
    found = np.zeros((power(len(x)), *x.shape[1:]), x.dtype)
    found[: len(x)] = x
    return found
