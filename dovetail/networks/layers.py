"""Dense layers: declaration, initialization of a whole network, and application.

A network declares its layers as a dict of `Layer`, and `init_layers` turns that dict into
parameters, a dict of the same shape with `{"weight": [inputs, outputs], "bias": [outputs]}` for
each layer. All weights come from one random draw, because every draw takes a third of a second to
compile: layer by layer, a small network takes 2 s to initialize instead of 0.6.
"""

import math
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

NOISE = 0.5
"""Initial standard deviation of noisy weights, times √inputs."""

SMALL = 2**19
"""Maximum number of input entries for which transposing a layer's input pays off: about a CPU's
cache. With larger inputs (image patches) the gradient would take up to 1.4 times as long."""


@dataclass(frozen=True)
class Layer:
    """Declaration of a dense layer: orthogonal weights of gain `scale`, zero biases."""

    inputs: int
    outputs: int
    scale: float
    blocks: int = 1
    """Number of equal blocks of outputs, each orthogonal on its own (a GRU's gates)."""
    noisy: bool = False
    """Whether the weights are means with learned standard deviations: see `noisy_dense`."""

    @property
    def noise(self) -> int:
        """Number of normal samples that `noisy_dense` takes."""
        return self.inputs + self.outputs


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
        means = {"weight": weight, "bias": jnp.zeros(layer.outputs)}
        if not layer.noisy:
            return means
        deviation = NOISE / math.sqrt(layer.inputs)
        return means | {
            "weight_noise": jnp.full((layer.inputs, layer.outputs), deviation),
            "bias_noise": jnp.full(layer.outputs, deviation),
        }

    return jax.tree.map(params, layers)


def dense(params: Params, x: jax.Array) -> jax.Array:
    """One dense layer: x W + b, for x [..., inputs] with any leading axes."""
    rows = x.reshape(-1, x.shape[-1])
    affine = _small_affine if rows.size <= SMALL else _affine
    return affine(rows, params["weight"], params["bias"]).reshape(*x.shape[:-1], -1)


def noisy_dense(params: Params, x: jax.Array, noise: jax.Array) -> jax.Array:
    """A dense layer with factorized Gaussian noise on its weights,
    https://arxiv.org/abs/1706.10295.

    `noise` holds normal samples [inputs + outputs]. The noise of a weight is the product of its
    input's and its output's noise, so the noisy weight matrix is never materialized.
    """
    scaled = jnp.sign(noise) * jnp.sqrt(jnp.abs(noise))
    inputs, outputs = scaled[: x.shape[-1]], scaled[x.shape[-1] :]
    deviation = dense({"weight": params["weight_noise"], "bias": params["bias_noise"]}, x * inputs)
    return dense(params, x) + deviation * outputs


def _affine(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    return x @ weight + bias


@jax.custom_vjp
def _small_affine(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    return _affine(x, weight, bias)


def _affine_forward(x: jax.Array, weight: jax.Array, bias: jax.Array) -> Any:
    return _affine(x, weight, bias), (x, weight)


def _affine_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> Any:
    """The usual gradients, with x transposed in memory first: on a CPU xᵀ g is three times slower
    when XLA fuses the transposition into the product."""
    x, weight = kept
    transposed = jax.lax.optimization_barrier(x.T)
    return gradient @ weight.T, transposed @ gradient, gradient.sum(axis=0)


_small_affine.defvjp(_affine_forward, _affine_backward)


def dense_each(params: Params, x: jax.Array) -> jax.Array:
    """One dense layer of each network in an ensemble: x [count, n, inputs], weights [count, inputs,
    outputs]. On a CPU one batched product takes two thirds of the time of separate ones."""
    if len(x) == 1:
        return dense(jax.tree.map(lambda leaf: leaf[0], params), x[0])[None]
    return _affine_each(x, params["weight"], params["bias"])


@jax.custom_vjp
def _affine_each(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    return x @ weight + bias[:, None]


def _each_forward(x: jax.Array, weight: jax.Array, bias: jax.Array) -> Any:
    return _affine_each(x, weight, bias), (x, weight)


def _each_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> Any:
    """The usual gradients. XLA multiplies batched transposed matrices as fast as plain ones (unlike
    a single one), and faster than the product JAX would emit, whose result is transposed. For
    layers with one output, the incoming gradient is materialized first: XLA would recompute it for
    every input."""
    x, weight = kept
    if weight.shape[-1] == 1:
        gradient = jax.lax.optimization_barrier(gradient)
    return gradient @ weight.swapaxes(1, 2), x.swapaxes(1, 2) @ gradient, gradient.sum(axis=1)


_affine_each.defvjp(_each_forward, _each_backward)


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The activation function called `name`."""
    if name not in ACTIVATIONS:
        raise UserError(f"There is no activation {name!r}: {nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _orthogonal(normal: jax.Array, rows: int, columns: int) -> jax.Array:
    """A uniformly random matrix with orthonormal columns (or rows, if it is wide)."""
    q, r = jax.lax.linalg.qr(
        normal.reshape(max(rows, columns), min(rows, columns)), full_matrices=False
    )
    # QR is unique only up to signs: fixing those of R's diagonal makes the distribution uniform.
    q = q * jnp.sign(jnp.diagonal(r))
    return q if rows >= columns else q.T
