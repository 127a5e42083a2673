"""Dense layers: what they are declared as, how a whole network of them begins, how one is applied.

A network declares its layers as a dict of `Layer`, and `init_layers` turns that dict into
parameters, a dict of the same shape with `{"weight": [inputs, outputs], "bias": [outputs]}` for
each layer. All weights come from one random draw, because every draw takes a third of a second to
compile: drawn layer by layer, a small network takes 2 s to begin instead of 0.6.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.errors import UserError, nearest

Params = dict[str, Any]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}


@dataclass(frozen=True)
class Layer:
    """A dense layer that is to be: orthogonal weights of gain `scale`, zero biases."""

    inputs: int
    outputs: int
    scale: float
    blocks: int = 1
    """How many equal parts the outputs have, each orthogonal by itself (a GRU's gates)."""


def init_layers(key: jax.Array, layers: dict[str, Any]) -> Params:
    """Parameters for a nested dict of `Layer`, orthogonal as in https://arxiv.org/abs/1312.6120."""
    blocks = [layer for layer in jax.tree.leaves(layers) for _ in range(layer.blocks)]
    sizes = [layer.inputs * layer.outputs // layer.blocks for layer in blocks]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    drawn = iter(jnp.split(jax.random.normal(key, (sum(sizes),)), ends[:-1]))

    def params(layer: Layer) -> Params:
        width = layer.outputs // layer.blocks
        weights = [_orthogonal(next(drawn), layer.inputs, width) for _ in range(layer.blocks)]
        weight = layer.scale * jnp.concatenate(weights, axis=1)
        return {"weight": weight, "bias": jnp.zeros(layer.outputs)}

    return jax.tree.map(params, layers)


def dense(params: Params, x: jax.Array) -> jax.Array:
    """One dense layer: x W + b."""
    return x @ params["weight"] + params["bias"]


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The activation called `name`."""
    if name not in ACTIVATIONS:
        raise UserError(f"There is no activation {name!r}: {nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _orthogonal(normal: jax.Array, rows: int, columns: int) -> jax.Array:
    """A uniformly random matrix with orthonormal columns (or rows, if it is wide)."""
    q, r = jax.lax.linalg.qr(
        normal.reshape(max(rows, columns), min(rows, columns)), full_matrices=False
    )
    q = q * jnp.sign(jnp.diagonal(r))
    return q if rows >= columns else q.T
