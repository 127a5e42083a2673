"""IMPALA's residual network for images, https://arxiv.org/abs/1802.01561.

Three sections of a convolution, a pooling and two residual blocks; then a dense layer. Convolutions
are matrix products, as in `cnn.py`.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.networks.cnn import as_floats, convolve
from dovetail.networks.layers import Layer, Params, dense, init_layers


@dataclass(frozen=True)
class ResidualCNN:
    """Images [..., H, W, C] → features [..., size]; uint8 images are scaled to 0 … 1."""

    channels: tuple[int, ...] = (16, 32, 32)
    """Of each section."""
    blocks: int = 2
    """Residual blocks in each section."""
    size: int = 256
    """Number of output features."""

    def layers(self, shape: tuple[int, ...]) -> dict[str, Any]:
        """Layer declarations for images of `shape` (H, W, C), to pass to `init_layers`."""
        height, width, inputs = shape
        layers: dict[str, Any] = {}
        for i, outputs in enumerate(self.channels):
            section = {"entry": _kernel(inputs, outputs)}
            for block in range(self.blocks):
                section[f"block_{block}_in"] = _kernel(outputs, outputs)
                section[f"block_{block}_out"] = _kernel(outputs, outputs)
            layers[f"section_{i}"] = section
            height, width, inputs = (height + 1) // 2, (width + 1) // 2, outputs
        layers["output"] = Layer(height * width * inputs, self.size, math.sqrt(2))
        return layers

    def init(self, key: jax.Array, shape: tuple[int, ...]) -> Params:
        """New parameters for images of `shape` (H, W, C)."""
        return init_layers(key, self.layers(shape))

    def apply(self, params: Params, images: jax.Array) -> jax.Array:
        """Features [..., size] of `images` [..., H, W, C]."""
        batch = images.shape[:-3]
        x = as_floats(images.reshape(-1, *images.shape[-3:]))
        for i in range(len(self.channels)):
            section = params[f"section_{i}"]
            x = _pooled(_same(section["entry"], x))
            for block in range(self.blocks):
                y = _same(section[f"block_{block}_in"], jax.nn.relu(x))
                x = x + _same(section[f"block_{block}_out"], jax.nn.relu(y))
        features = dense(params["output"], jax.nn.relu(x).reshape(*batch, -1))
        return jax.nn.relu(features)


def _kernel(inputs: int, outputs: int) -> Layer:
    return Layer(9 * inputs, outputs, math.sqrt(2))


def _same(params: Params, x: jax.Array) -> jax.Array:
    """A 3 × 3 convolution that keeps height and width."""
    return convolve(params, jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), 3, 1)


def _pooled(x: jax.Array) -> jax.Array:
    """The maximum over windows of 3 × 3 with stride 2: [N, H, W, C] → [N, ⌈H/2⌉, ⌈W/2⌉, C]."""
    _, height, width, _ = x.shape
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-jnp.inf)
    # A maximum of slices: XLA's own pooling has a gradient that is slow on a CPU.
    slices = [x[:, i : i + height : 2, j : j + width : 2] for i in range(3) for j in range(3)]
    largest = slices[0]
    for other in slices[1:]:
        largest = jnp.maximum(largest, other)
    return largest
