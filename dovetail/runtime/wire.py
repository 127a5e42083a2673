"""Arrays on their way between processes: numpy, and random keys as the words they are made of."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.keys import from_words, is_ours
from dovetail.runtime.packing import Values


@dataclass(frozen=True)
class KeyWords:
    """Random keys, as words."""

    words: np.ndarray
    kind: str
    """One of JAX's own; empty for ours."""


def pack(leaf: Any) -> Any:
    """An array as another process can take it."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        kind = "" if is_ours(leaf) else str(jax.random.key_impl(leaf))
        return KeyWords(np.asarray(jax.random.key_data(leaf)), kind)
    return np.asarray(leaf)


def pack_values(values: Values) -> Values:
    """Values by number as another process can take them."""
    return {number: pack(leaf) for number, leaf in values.items()}


def unpack_values(values: Values) -> Values:
    """What `pack_values` was given, as numpy or random keys."""
    return {number: unpack(leaf) for number, leaf in values.items()}


def unpack(leaf: Any) -> Any:
    """What `pack` was given, as numpy or random keys."""
    if isinstance(leaf, KeyWords) and not leaf.kind:
        return from_words(jnp.asarray(leaf.words))
    if isinstance(leaf, KeyWords):
        return jax.random.wrap_key_data(jnp.asarray(leaf.words), impl=leaf.kind)
    return leaf
