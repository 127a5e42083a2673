"""A network's weights as one flat vector, so that elementwise updates run as one operation.

An optimizer that processes many small arrays one by one spends most of a small step on overhead.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def to_vector(tree: Any) -> jax.Array:
    """All leaves of a tree, flattened and concatenated."""
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def from_vector(vector: jax.Array, shapes: Any) -> Any:
    """The tree of `shapes`, a pytree of jax.ShapeDtypeStruct, with leaves from a vector."""
    leaves, structure = jax.tree.flatten(shapes)
    ends = np.cumsum([np.prod(leaf.shape, dtype=np.int64) for leaf in leaves]).tolist()
    starts = [0, *ends[:-1]]
    parts = zip(leaves, starts, ends, strict=True)
    return structure.unflatten([vector[i:j].reshape(leaf.shape) for leaf, i, j in parts])
