"""The rows of a device table: small leaves packed into words, large ones in separate arrays.

Reading or writing a row is then one operation of the compiled program for all its small leaves,
instead of one each. The booleans of a row (whether it is final, whether a step terminated, …) are
bits of one word.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.replay.leaves import RowLeaf, leaves_of
from dovetail.replay.table import SMALL

WORD = 4
"""Bytes of a word."""
BITS = 8 * WORD
FINAL = np.uint32(1)
"""The bit that marks a row as only the final observation of an episode."""


@dataclass(frozen=True)
class DeviceRowForm:
    """Where each leaf of a row is stored."""

    tree: Any
    """The structure of a row."""
    leaves: tuple[RowLeaf, ...]
    frames: frozenset[int]
    """Positions of leaves with a history, which are stored frame by frame."""

    @property
    def words(self) -> tuple[int, ...]:
        """Positions of leaves stored as words."""
        return tuple(i for i, leaf in self._small() if np.dtype(leaf.dtype).itemsize == WORD)

    @property
    def bits(self) -> tuple[int, ...]:
        """Positions of leaves stored as bits of the first word."""
        # `FINAL` takes one bit.
        found, room = list[int](), BITS - 1
        for i, leaf in self._small():
            size = prod(leaf.shape)
            if leaf.dtype == np.bool_ and size <= room:
                found.append(i)
                room -= size
        return tuple(found)

    @property
    def alone(self) -> tuple[int, ...]:
        """Positions of all others."""
        packed = {*self.words, *self.bits}
        return tuple(i for i in range(len(self.leaves)) if i not in packed)

    @property
    def width(self) -> int:
        """Words per row."""
        return 1 + sum(prod(self.leaves[i].shape) for i in self.words)

    def _small(self) -> list[tuple[int, RowLeaf]]:
        """(position, leaf) of the leaves that may be packed."""
        return [
            (i, leaf)
            for i, leaf in enumerate(self.leaves)
            if i not in self.frames
            and prod(leaf.shape) * np.dtype(leaf.dtype).itemsize <= SMALL
            # Other dtypes, such as keys, cannot be cast to words.
            and np.dtype(leaf.dtype).kind in "biuf"
        ]

    def pack(self, leaves: Sequence[jax.Array], final: jax.Array) -> jax.Array:
        """The words [n, W] of rows [n, …], with `final` [n] as the first bit."""
        flags, shift = final.astype(jnp.uint32), 1
        for i in self.bits:
            size = prod(self.leaves[i].shape)
            values = leaves[i].reshape(final.size, size).astype(jnp.uint32)
            # No two values share a bit, so the sum is their union.
            flags |= (values << np.arange(shift, shift + size, dtype=np.uint32)).sum(
                axis=1, dtype=jnp.uint32
            )
            shift += size
        parts = [
            # A bitcast keeps floats and integers exact.
            jax.lax.bitcast_convert_type(leaves[i], jnp.uint32).reshape(final.size, -1)
            for i in self.words
        ]
        return jnp.concatenate([flags[:, None], *parts], axis=1)

    def unpack(self, words: jax.Array) -> tuple[dict[int, jax.Array], jax.Array]:
        """(leaves [..., …] by position, which rows are final) from words [..., W]."""
        found: dict[int, jax.Array] = {}
        flags, shift, at, axes = words[..., 0], 1, 1, words.shape[:-1]
        for i in self.bits:
            shape = self.leaves[i].shape
            places = np.arange(shift, shift + prod(shape), dtype=np.uint32).reshape(shape)
            spread = flags.reshape(*axes, *(1 for _ in shape))
            found[i] = (spread >> places) & 1 != 0
            shift += prod(shape)
        for i in self.words:
            leaf = self.leaves[i]
            size = prod(leaf.shape)
            part = words[..., at : at + size].reshape(*axes, *leaf.shape)
            found[i] = jax.lax.bitcast_convert_type(part, leaf.dtype)
            at += size
        return found, flags & FINAL != 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceRows:
    """Rings of rows, or the rows of items that own them."""

    words: jax.Array
    """[rows, W]"""
    alone: tuple[jax.Array, ...]
    """Separately stored leaves: [rows, …], or [frames, …] with a history."""
    form: DeviceRowForm = field(metadata={"static": True})

    @staticmethod
    def empty(
        example: Any, rows: int, frames: int, shapes: dict[str, tuple[int, ...]]
    ) -> "DeviceRows":
        """`rows` zero rows like `example`; `shapes` maps the path of each leaf with a history to
        the shape of its frames."""
        leaves = tuple(leaves_of(example))
        stacked = frozenset(i for i, leaf in enumerate(leaves) if leaf.path in shapes)
        form = DeviceRowForm(jax.tree.structure(example), leaves, stacked)

        def zeros(i: int) -> jax.Array:
            leaf = leaves[i]
            if i in stacked:
                return jnp.zeros((frames, *shapes[leaf.path]), leaf.dtype)
            return jnp.zeros((rows, *leaf.shape), leaf.dtype)

        words = jnp.zeros((rows, form.width), jnp.uint32)
        return DeviceRows(words, tuple(zeros(i) for i in form.alone), form)

    def with_words(self, places: jax.Array, leaves: Any, final: jax.Array) -> "DeviceRows":
        """The rows with the small leaves of rows [n, …] written to `places`."""
        words = self.words.at[places].set(self.form.pack(leaves, final), mode="drop")
        return replace(self, words=words)

    def with_final(self, places: jax.Array) -> "DeviceRows":
        """The rows with those at `places` marked as final."""
        flags = self.words.at[places, 0].get(mode="clip") | FINAL
        return replace(self, words=self.words.at[places, 0].set(flags, mode="drop"))
