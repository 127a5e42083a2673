"""Small arrays that are handed over as one: a program's every array costs time.

Handing an array to a compiled program and taking one from it costs some microseconds, whatever its
size; a learner that takes a small step each time would spend most of its time on that. What one
program alone reads and makes anew is therefore held as one array for each kind of number, and what
an unroll leaves for the learner beside it lies in one piece of memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.graph.ir import Fragment, Graph, Value
from dovetail.graph.vectors import unpack

LARGEST = 64 * 1024
"""Bytes of an array that is put with others: larger ones are dearer to copy than to hand over."""
LARGEST_HELD = 256
"""The same for what a replay holds, which is otherwise changed in place."""
LARGEST_SLAB = 256 * 1024
"""The same for an unroll's buffers, all together."""
ALIGNMENT = 64
"""Where an array begins within a slab, in bytes."""
FEWEST = 3
"""How many make a bundle."""


class Packed:
    """The key, among the values of a running iteration, of an array in which several lie together.

    Each is made once, so that it is hashed and compared by its identity: that is as fast as for the
    numbers of single values.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Packed({self.name})"


Key = int | Packed
"""Of an array of a running iteration: the number of a value, or of several together."""
Values = dict[Key, Any]
"""The arrays of a running iteration."""


@cache
def packed(what: str, position: int = 0) -> Packed:
    """The key of what a program takes or makes together: the same on all workers that share it."""
    return Packed(f"{what} {position}")


@dataclass(frozen=True)
class Bundle:
    """Values that a program takes as one array."""

    taken: tuple[Value, ...]
    """What the program takes, and in the same order"""
    made: tuple[Value, ...]
    """what it makes for the next iteration; empty if these are no values of the state."""
    shared: frozenset[int]
    """Numbers of those that others read as well: they are held by themselves, too."""
    key_taken: Packed
    key_made: Packed
    shape: jax.ShapeDtypeStruct
    """Of the one array."""
    unpack: Callable[[Any], list[jax.Array]] = field(compare=False)

    @staticmethod
    def pack(leaves: Sequence[Any]) -> jax.Array:
        """Values of the state as one array: joined in one go, which is faster for few and small."""
        return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])

    def is_shared(self, old: Value, new: Value) -> bool:
        """Whether others read a value, or what it becomes."""
        return old.id in self.shared or new.id in self.shared

    @property
    def pairs(self) -> list[tuple[Value, Value]]:
        """Each value with what it becomes."""
        return list(zip(self.taken, self.made, strict=bool(self.made)))


def bundles_of(fragment: Fragment, graph: Graph, shared: set[int], others: int) -> list[Bundle]:
    """What of the state can be held together for a program; other nodes read `shared`, and there
    are so many `others` of the same worker."""
    taken, made = ({v.id for v in side} for side in (fragment.inputs, fragment.outputs))
    avals = dict(zip((v.id for v in fragment.inputs), fragment.program.jaxpr.invars, strict=True))
    pairs = [
        (old, new)
        for old, new in zip(graph.state.inputs, graph.state.outputs, strict=True)
        if old.id in taken and new.id in made and not _is_key(avals[old.id].aval)
    ]
    return _bundles(pairs, graph, shared, others)


def bundles_of_state(graph: Graph, leaves: Sequence[Any]) -> list[Bundle]:
    """What of the whole state can be held together; `leaves` are its arrays or their shapes."""
    pairs = enumerate(zip(graph.state.inputs, graph.state.outputs, leaves, strict=True))
    plain = [
        (old, new) for i, (old, new, leaf) in pairs if i not in graph.data and not _is_key(leaf)
    ]
    return _bundles(plain, graph, set(), 0)


def _is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.extended)


def _bundles(
    pairs: Sequence[tuple[Value, Value]], graph: Graph, shared: set[int], first: int
) -> list[Bundle]:
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
    """How an unroll's buffers lie in one piece of memory."""

    places: dict[int, tuple[Value, int]]
    """By its number, each value and where it begins, in bytes."""
    nbytes: int
    key: ClassVar[Packed] = packed("unroll")
    """Of that memory."""

    @staticmethod
    def of(values: Sequence[Value]) -> "Slab | None":
        """None if it would be too large."""
        places: dict[int, tuple[Value, int]] = {}
        end = 0
        for value in values:
            places[value.id] = value, end
            end += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
        return Slab(places, end) if end <= LARGEST_SLAB else None

    def buffers(self) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """(the memory, the array of each value in it)."""
        memory = np.zeros(self.nbytes, np.uint8)
        arrays = {
            number: memory[begin : begin + value.nbytes].view(value.dtype).reshape(value.shape)
            for number, (value, begin) in self.places.items()
        }
        return memory, arrays

    def bundle(self, wanted: Sequence[Value]) -> Bundle | None:
        """What a program takes of it; None if that is nothing."""
        taken = tuple(value for value in wanted if value.id in self.places)
        if not taken:
            return None

        def unpack(memory: Any) -> list[jax.Array]:
            return [_read(memory, *self.places[value.id]) for value in taken]

        shape = jax.ShapeDtypeStruct((self.nbytes,), np.uint8)
        return Bundle(taken, (), frozenset(), self.key, packed("nothing"), shape, unpack)


def _read(memory: Any, value: Value, begin: int) -> jax.Array:
    """A value's array within bytes."""
    own = memory[begin : begin + value.nbytes]
    if value.dtype == np.bool_:
        return own.reshape(value.shape) != 0
    size = value.dtype.itemsize
    words = own if size == 1 else own.reshape(-1, size)
    return jax.lax.bitcast_convert_type(words, value.dtype).reshape(value.shape)
