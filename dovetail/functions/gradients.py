"""Gradients of a mean over many samples, taken in pieces that fit a processor's cache.

On a CPU the activations of a large minibatch go to memory and back; summed over pieces the same
gradient takes about half the time. A piece has as many samples as the activations allow: thousands
for a small network on vectors, 32 for a convolutional one on Atari's frames. Elsewhere the whole is
taken at once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, subjaxprs

CACHED = 20 * 2**20
"""Bytes that the matrix products of a piece take and give, weights aside, at most."""

Loss = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]


def gradient(
    loss: Loss, params: Any, samples: Any, *rest: Any, axis: int = 0, piece: int | None = None
) -> tuple[Any, Any]:
    """(gradient, metrics) of `loss(params, samples, *rest)`, a mean over an axis of `samples`.

    The metrics are the averages of the pieces'. `piece` overrides the largest number of samples
    taken at once.
    """
    count = jax.tree.leaves(samples)[0].shape[axis]
    largest = piece or count
    if piece is None and jax.default_backend() == "cpu":
        whole = activation_bytes(jax.make_jaxpr(loss)(params, samples, *rest).jaxpr)
        largest = max(1, CACHED * count // max(1, whole))
    pieces = _pieces(count, largest)
    grad = jax.grad(loss, has_aux=True)
    if pieces == 1:
        return grad(params, samples, *rest)

    def parts(x: jax.Array) -> jax.Array:
        shape = *x.shape[:axis], pieces, count // pieces, *x.shape[axis + 1 :]
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    split = jax.tree.map(parts, samples)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, grad(params, part, *rest)), None

    shapes = jax.eval_shape(grad, params, jax.tree.map(lambda x: x[0], split), *rest)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, _ = jax.lax.scan(add, zeros, split)
    return jax.tree.map(lambda x: x / pieces, total)


def activation_bytes(jaxpr: Jaxpr) -> int:
    """Bytes of what the matrix products of a program multiply with weights, and of what they
    make."""
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    arrays: list[Any] = [v.aval for eqn in products for v in (eqn.invars[0], eqn.outvars[0])]
    own = sum(array.size * array.dtype.itemsize for array in arrays)
    return own + sum(activation_bytes(inner) for inner in subjaxprs(jaxpr))


def _pieces(count: int, largest: int) -> int:
    """The fewest equal pieces of at most `largest`; one if there are none that divide `count`."""
    fewest = -(-count // largest)
    return next((n for n in range(fewest, 2 * fewest) if count % n == 0), 1)
