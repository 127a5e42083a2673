"""Several arrays as one vector: a collective costs time for each array.

Each is written into its place, for on a CPU XLA concatenates and pads by masked reads: of a small
array as if it were as long as the whole. Where the memory round it is not mapped, which is a matter
of luck, every such read takes many times as long, and an update that averages gradients two to
three times as long.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def pack(leaves: Sequence[Any]) -> jax.Array:
    """The arrays one behind the other, as one kind of number."""
    kind = jnp.result_type(*[leaf.dtype for leaf in leaves])
    vector, begin = jnp.zeros(sum(leaf.size for leaf in leaves), kind), 0
    for leaf in leaves:
        flat = jnp.ravel(leaf).astype(kind)
        vector = jax.lax.dynamic_update_slice(vector, flat, (begin,))
        begin += leaf.size
    return vector


def unpack(vector: Any, shapes: Sequence[Any]) -> list[jax.Array]:
    """The arrays that a vector was packed of; `shapes` are such arrays or their shapes."""
    sizes = [int(np.prod(leaf.shape, dtype=np.int64)) for leaf in shapes]
    ends = np.cumsum(sizes).tolist()
    parts = zip(shapes, sizes, ends, strict=True)
    return [
        vector[end - size : end].reshape(leaf.shape).astype(leaf.dtype) for leaf, size, end in parts
    ]
