"""Splits a dataset into parts of whole episodes, bounded in bytes."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dovetail.data.blocks import whole_episodes
from dovetail.data.reader import Reader

Array = np.ndarray[Any, np.dtype[Any]]

STEPS = 1 << 15
"""Approximate maximum number of rows per part."""
BYTES = 1 << 24
"""Approximate maximum bytes of a part's observations; padding may take four times as much."""


def rows_at_once(reader: Reader) -> int:
    """Number of rows per part."""
    leaves = jax.tree.leaves(reader.codec.observation)
    each = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return max(min(STEPS, BYTES // max(each, 1)), 1)


def parts(reader: Reader) -> Iterator[range]:
    """The episodes of each part: at least one, however long."""
    return whole_episodes(reader.episodes.lengths + 1, rows_at_once(reader))


def power(n: int) -> int:
    """The next power of two: sizes are rounded up to it, so that few shapes are compiled."""
    return 1 << max(n - 1, 0).bit_length()


def filled(x: Array) -> Array:
    """[n, …], zero-padded to a power of two."""
    found = np.zeros((power(len(x)), *x.shape[1:]), x.dtype)
    found[: len(x)] = x
    return found
