"""The arrays that workers pass around, and their keys in a running iteration.

The runtime handles the leaves of trees, never the trees: only an algorithm knows the type of its
state, weights and carries. Where such a tree passes through, its type is `object`.
"""

from collections.abc import Iterable
from functools import cache
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Literal, Var

from dovetail.graph.ir import Value

Leaf = jax.Array | np.ndarray
"""An array on a device or on the host; programs take both. A random key is a `jax.Array`."""
Input = Leaf | list[Leaf]
"""An input of a program: an array, or one piece of it from each of several sending copies."""


class Packed:
    """The key of a packed array among the values of a running iteration.

    Each key is created once and hashed by identity, which is as fast as the integer keys of single
    values.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Packed({self.name})"


Key = int | Packed
"""The key of an array in a running iteration: the number of a value, or of a packed array."""
Values = dict[Key, Input]
"""The arrays of a running iteration."""


@cache
def packed(what: str, position: int = 0) -> Packed:
    """The key of a packed array; workers that share a program share its keys."""
    return Packed(f"{what} {position}")


def avals_of(variables: Iterable[Var | Literal]) -> list[ShapedArray]:
    """The shapes and dtypes of a jaxpr's variables, all of which are arrays."""
    # JAX also has abstract values of tokens and refs, which no fragment takes or returns.
    avals = [variable.aval for variable in variables]
    return [aval for aval in avals if isinstance(aval, ShapedArray)]


def is_key(array: Leaf | ShapedArray | jax.ShapeDtypeStruct) -> bool:
    """Whether this is an array of random keys; numpy and arithmetic know nothing of these."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def zeros_of(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of a shape and dtype, on the default device."""
    if is_key(shape):
        return jnp.zeros(shape.shape, shape.dtype)
    # Not `jnp.zeros`, which compiles a program for every shape.
    return jax.device_put(np.zeros(shape.shape, shape.dtype))


def leaves_of(values: Values, wanted: Iterable[Value]) -> list[Leaf]:
    """The arrays of these values. They must be whole; only inputs of programs arrive in pieces."""
    # A cast, not a check: the runtime calls this in every turn.
    return cast(list[Leaf], [values[value.id] for value in wanted])


def numbered(wanted: Iterable[Value], leaves: Iterable[Leaf]) -> Values:
    """Inverse of `leaves_of`: each leaf under the number of its value."""
    return dict(zip((value.id for value in wanted), leaves, strict=True))
