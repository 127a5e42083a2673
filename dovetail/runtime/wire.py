"""Arrays in transit between processes: numpy arrays, and random keys as words."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.keys import from_words, is_ours
from dovetail.runtime.arrays import Key, Leaf, Values, is_key


@dataclass(frozen=True)
class KeyWords:
    """Random keys as their uint32 words."""

    words: Leaf
    """The words on the last axis; a numpy array when sent to another process."""
    kind: str
    """JAX's name of the key implementation; empty for Dovetail's."""


Sendable = np.ndarray | KeyWords
"""An array in a form that can be sent to another process."""
SentValues = dict[Key, Sendable]
"""The values of a message between processes."""


def pack(leaf: Leaf) -> Sendable:
    """Converts an array to a form that can be sent to another process.

    Copies it from its device, unless it is a numpy array already.
    """
    if not isinstance(leaf, jax.Array):
        return leaf
    if is_key(leaf):
        kind = "" if is_ours(leaf) else str(jax.random.key_impl(leaf))
        return KeyWords(np.asarray(jax.random.key_data(leaf)), kind)
    return np.asarray(leaf)


def pack_values(values: Values) -> SentValues:
    """Applies `pack` to every value; none of them is in pieces."""
    found: SentValues = {}
    for key, leaf in values.items():
        assert not isinstance(leaf, list)  # only the inputs of a program are
        found[key] = pack(leaf)
    return found


def unpack_values(values: SentValues) -> Values:
    """Applies `unpack` to every value."""
    return {key: unpack(leaf) for key, leaf in values.items()}


def unpack(leaf: Sendable) -> Leaf:
    """Inverse of `pack`; returns numpy arrays and random keys."""
    return unpack_keys(leaf) if isinstance(leaf, KeyWords) else leaf


def unpack_keys(packed: KeyWords) -> jax.Array:
    """The random keys with these words."""
    words = jnp.asarray(packed.words)
    return jax.random.wrap_key_data(words, impl=packed.kind) if packed.kind else from_words(words)
