"""Arrays in transit between processes: numpy arrays, and random keys as words."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.keys import from_words, is_ours
from dovetail.runtime.packing import Values


@dataclass(frozen=True)
class KeyWords:
    """Random keys as their uint32 words."""

    words: np.ndarray
    kind: str
    """JAX's name of the key implementation; empty for Dovetail's."""


def pack(leaf: Any) -> Any:
    """Converts an array to a form that can be sent to another process."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        kind = "" if is_ours(leaf) else str(jax.random.key_impl(leaf))
        return KeyWords(np.asarray(jax.random.key_data(leaf)), kind)
    return np.asarray(leaf)


def pack_values(values: Values) -> Values:
    """Applies `pack` to every value."""
    return {number: pack(leaf) for number, leaf in values.items()}


def unpack_values(values: Values) -> Values:
    """Applies `unpack` to every value."""
    return {number: unpack(leaf) for number, leaf in values.items()}


def unpack(leaf: Any) -> Any:
    """Inverse of `pack`; returns numpy arrays and random keys."""
    if isinstance(leaf, KeyWords) and not leaf.kind:
        return from_words(jnp.asarray(leaf.words))
    if isinstance(leaf, KeyWords):
        return jax.random.wrap_key_data(jnp.asarray(leaf.words), impl=leaf.kind)
    return leaf
