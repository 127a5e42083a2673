"""Packs small arrays into one, because every argument and result of a program has a cost.

Passing an array to or from a compiled program takes a few microseconds, whatever its size. A
learner with small updates would spend most of its time on that. State that only one program reads
and writes is therefore held as one array per dtype, and the trajectory of an unroll on the
learner's worker lives in one block of memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.graph.ir import Fragment, Graph, Value
from dovetail.graph.vectors import unpack
from dovetail.runtime.arrays import Leaf, Packed, avals_of, is_key, packed

LARGEST = 64 * 1024
"""Maximum bytes of an array in a bundle: copying larger ones costs more than passing them."""
LARGEST_HELD = 256
"""The same for the arrays of a replay, which are otherwise updated in place."""
LARGEST_SLAB = 256 * 1024
"""Maximum total bytes of an unroll's buffers in one block."""
ALIGNMENT = 64
"""Alignment of arrays within a slab, in bytes."""
FEWEST = 3
"""Minimum number of arrays in a bundle."""


@dataclass(frozen=True)
class Bundle:
    """Values that a program takes as one array."""

    taken: tuple[Value, ...]
    """The inputs of the program in the bundle."""
    made: tuple[Value, ...]
    """Its outputs for the next iteration, in the same order; empty if this is not state."""
    shared: frozenset[int]
    """Numbers of the values that other nodes read too: they are also held separately."""
    key_taken: Packed
    key_made: Packed
    shape: jax.ShapeDtypeStruct
    """Shape and dtype of the packed array."""
    unpack: Callable[[Leaf], list[jax.Array]] = field(compare=False)
    """Inverse of `pack`, or of writing into a slab; runs inside a compiled program."""

    @staticmethod
    def pack(leaves: Sequence[Leaf]) -> jax.Array:
        """Packs values of the state; for few small arrays, one concatenate is fastest."""
        return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])

    def is_shared(self, old: Value, new: Value) -> bool:
        """Whether other nodes read the old or the new value."""
        return old.id in self.shared or new.id in self.shared

    @property
    def pairs(self) -> list[tuple[Value, Value]]:
        """Each value with its successor in the next iteration."""
        return list(zip(self.taken, self.made, strict=bool(self.made)))


def bundles_of(fragment: Fragment, graph: Graph, shared: set[int], others: int) -> list[Bundle]:
    """The bundles of state values that a fragment both reads and writes.

    `shared` are the numbers of values that other nodes read, `others` the number of bundles the
    worker already has.
    """
    taken, made = ({v.id for v in side} for side in (fragment.inputs, fragment.outputs))
    avals = avals_of(fragment.program.jaxpr.invars)
    keys = {v.id for v, aval in zip(fragment.inputs, avals, strict=True) if is_key(aval)}
    pairs = [
        (old, new)
        for old, new in zip(graph.state.inputs, graph.state.outputs, strict=True)
        if old.id in taken and new.id in made and old.id not in keys
    ]
    return _bundles(pairs, graph, shared, others)


def bundles_of_state(graph: Graph, leaves: Sequence[Leaf]) -> list[Bundle]:
    """The bundles of the whole state; `leaves` are its arrays or their shapes."""
    pairs = enumerate(zip(graph.state.inputs, graph.state.outputs, leaves, strict=True))
    plain = [
        (old, new) for i, (old, new, leaf) in pairs if i not in graph.data and not is_key(leaf)
    ]
    return _bundles(plain, graph, set(), 0)


def _bundles(
    pairs: Sequence[tuple[Value, Value]], graph: Graph, shared: set[int], first: int
) -> list[Bundle]:
    """One bundle for each dtype with enough small arrays; `first` numbers the keys."""
    kinds: dict[np.dtype, list[tuple[Value, Value]]] = {}
    for old, new in pairs:
        if old.nbytes <= (LARGEST_HELD if old.side in graph.tables else LARGEST):
            kinds.setdefault(old.dtype, []).append((old, new))
    groups = [group for group in kinds.values() if len(group) >= FEWEST]
    return [_bundle(group, shared, first + i) for i, group in enumerate(groups)]


def _bundle(group: list[tuple[Value, Value]], shared: set[int], position: int) -> Bundle:
    taken, made = (tuple(values) for values in zip(*group, strict=True))
    read = frozenset(value.id for value in (*taken, *made)) & shared
    size = sum(int(np.prod(value.shape, dtype=np.int64)) for value in taken)
    shape = jax.ShapeDtypeStruct((size,), taken[0].dtype)
    keys = packed("taken", position), packed("made", position)
    return Bundle(taken, made, read, *keys, shape, partial(unpack, shapes=taken))


@dataclass(frozen=True)
class Slab:
    """The layout of an unroll's buffers in one block of memory."""

    places: dict[int, tuple[Value, int]]
    """Value number → (value, offset in bytes)."""
    nbytes: int
    key: ClassVar[Packed] = packed("unroll")
    """The key of the memory block."""

    @staticmethod
    def of(values: Sequence[Value]) -> "Slab | None":
        """The layout of these values; None if it would be too large."""
        places: dict[int, tuple[Value, int]] = {}
        end = 0
        for value in values:
            places[value.id] = value, end
            end += -(-value.nbytes // ALIGNMENT) * ALIGNMENT  # rounded up
        return Slab(places, end) if end <= LARGEST_SLAB else None

    def buffers(self) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Allocates the block; returns it with a view for each value, by number.

        Programs take the block [nbytes] as one argument; the host writes to the views.
        """
        # Bytes, because the slab mixes dtypes; each view has its own dtype.
        memory = np.zeros(self.nbytes, np.uint8)
        arrays = {
            number: memory[begin : begin + value.nbytes].view(value.dtype).reshape(value.shape)
            for number, (value, begin) in self.places.items()
        }
        return memory, arrays

    def bundle(self, wanted: Sequence[Value]) -> Bundle | None:
        """The bundle of the wanted values that live in the slab; None if there are none.

        A program reads its values from the bytes of the block.
        """
        taken = tuple(value for value in wanted if value.id in self.places)
        if not taken:
            return None

        def unpack(memory: Leaf) -> list[jax.Array]:
            return [_read(memory, *self.places[value.id]) for value in taken]

        shape = jax.ShapeDtypeStruct((self.nbytes,), np.uint8)
        return Bundle(taken, (), frozenset(), self.key, packed("nothing"), shape, unpack)


def _read(memory: Leaf, value: Value, begin: int) -> jax.Array:
    """Reads a value from the bytes of a slab, inside a compiled program."""
    own = memory[begin : begin + value.nbytes]
    if value.dtype == np.bool_:  # bitcasts do not support booleans
        return own.reshape(value.shape) != 0
    size = value.dtype.itemsize
    words = own if size == 1 else own.reshape(-1, size)
    return jax.lax.bitcast_convert_type(words, value.dtype).reshape(value.shape)
