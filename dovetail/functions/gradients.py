"""Gradients of a mean over many samples, accumulated over pieces that fit into a CPU's cache.

On a CPU the activations of a large minibatch go to memory and back; accumulating over pieces takes
about half the time for the same gradient. The size of a piece depends on the activations: thousands
of samples for a small network on vectors, 32 for a convolutional one on Atari frames. Other back
ends process the whole batch at once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, subjaxprs

CACHED = 20 * 2**20
"""Maximum bytes of inputs and outputs of a piece's matrix products, without the weights."""

Loss = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]


def gradient(
    loss: Loss, params: Any, samples: Any, *rest: Any, axis: int = 0, piece: int | None = None
) -> tuple[Any, Any]:
    """(gradient, metrics) of `loss(params, samples, *rest)`, a mean over an axis of `samples`.

    Metrics are averaged over the pieces. `piece` overrides the maximum number of samples per piece.
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

    # Accumulators need only the shapes: no gradient is computed here.
    shapes = jax.eval_shape(grad, params, jax.tree.map(lambda x: x[0], split), *rest)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, _ = jax.lax.scan(add, zeros, split)
    return jax.tree.map(lambda x: x / pieces, total)


def activation_bytes(jaxpr: Jaxpr) -> int:
    """Bytes of the activations that a program's matrix products read and write."""
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    arrays: list[Any] = [v.aval for eqn in products for v in (eqn.invars[0], eqn.outvars[0])]
    own = sum(array.size * array.dtype.itemsize for array in arrays)
    return own + sum(activation_bytes(inner) for inner in subjaxprs(jaxpr))


def _pieces(count: int, largest: int) -> int:
    """The smallest number of equal pieces of at most `largest`; 1 if there is none nearby."""
    fewest = -(-count // largest)
    return next((n for n in range(fewest, 2 * fewest) if count % n == 0), 1)
