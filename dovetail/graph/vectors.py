"""Packs several arrays into one vector, since a collective has a cost per array.

`pack` writes each array into its slice instead of concatenating. On CPU, XLA implements
concatenate and pad with masked reads that treat a small array as if it were as long as the result.
If the memory around it happens not to be mapped, every such read is many times slower, and an
update that averages gradients takes two to three times as long.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def pack(leaves: Sequence[Any]) -> jax.Array:
    """Flattens the arrays into one vector of their common dtype."""
    kind = jnp.result_type(*[leaf.dtype for leaf in leaves])
    vector, begin = jnp.zeros(sum(leaf.size for leaf in leaves), kind), 0
    for leaf in leaves:
        flat = jnp.ravel(leaf).astype(kind)
        vector = jax.lax.dynamic_update_slice(vector, flat, (begin,))
        begin += leaf.size
    return vector


def unpack(vector: Any, shapes: Sequence[Any]) -> list[jax.Array]:
    """Inverse of `pack`; each of `shapes` has the `shape` and `dtype` of one array."""
    sizes = [int(np.prod(leaf.shape, dtype=np.int64)) for leaf in shapes]
    ends = np.cumsum(sizes).tolist()
    parts = zip(shapes, sizes, ends, strict=True)
    return [
        vector[end - size : end].reshape(leaf.shape).astype(leaf.dtype) for leaf, size, end in parts
    ]
