"""Inputs that several copies of a side send: the shapes of the pieces, and how they are joined."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from dovetail.boundaries import BATCH_AXIS, How
from dovetail.graph.ir import Arrival
from dovetail.runtime.arrays import Input, Leaf

CountPieces = Callable[[Arrival], int]
"""The number of pieces in which an input arrives: one from each sending copy."""


def sent_shape(
    aval: ShapedArray | jax.ShapeDtypeStruct, how: Arrival | None, count_pieces: CountPieces
) -> jax.ShapeDtypeStruct | list[jax.ShapeDtypeStruct]:
    """The shape of an arriving input; a list of shapes if several copies send pieces."""
    count = 1 if how is None else count_pieces(how)
    if how is None or count == 1:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    shape = list(aval.shape)
    if how.how is How.JOIN:  # the pieces of a mean are as large as the whole
        shape[BATCH_AXIS] //= count
    return [jax.ShapeDtypeStruct(tuple(shape), aval.dtype)] * count


def whole_shape(shape: jax.ShapeDtypeStruct, replicas: int) -> jax.ShapeDtypeStruct:
    """The shape of a sharded array, given the equal part of each replica."""
    sizes = list(shape.shape)
    sizes[BATCH_AXIS] *= replicas
    return shape.update(shape=tuple(sizes))


def comes_split(how: Arrival | None) -> bool:
    """Whether an input arrives sharded among the replicas."""
    return how is not None and how.how in (How.JOIN, How.DIVIDE)


def joined(how: Arrival | None, value: Input) -> Leaf:
    """Joins the pieces of several copies along the batch axis, or averages them.

    Runs inside a compiled program, so that XLA fuses it with the first operation on the result.
    """
    if not isinstance(value, list):
        return value
    if how is not None and how.how is How.JOIN:
        return jnp.concatenate(value, axis=BATCH_AXIS)
    # The division promotes integers to floats; a mean keeps the dtype of its pieces.
    return (sum(value[1:], start=value[0]) / len(value)).astype(value[0].dtype)


def joined_on_host(how: Arrival | None, value: Input) -> np.ndarray:
    """Like `joined`, for plain Python: a numpy array from pieces of either kind."""
    if not isinstance(value, list):
        return np.asarray(value)
    pieces = [np.asarray(piece) for piece in value]
    if how is not None and how.how is How.MEAN:
        return np.mean(pieces, axis=0, dtype=pieces[0].dtype)
    return np.concatenate(pieces, axis=BATCH_AXIS)
