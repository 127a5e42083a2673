"""Convolutional networks for images, written as patches × matmul.

XLA's gradient of a convolution inside `lax.scan` is many times slower on a CPU than outside it;
a matrix product over patches is equally fast in both. Strides that divide their kernel make
patches cheap: fold blocks of stride × stride pixels into channels, then join the few shifted
copies that one kernel covers.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dovetail.errors import UserError
from dovetail.networks.layers import Layer, Params, activation, dense, init_layers


@dataclass(frozen=True)
class CNN:
    """Convolutions without padding, then a dense layer: [..., H, W, C] → [..., size].

    Images of integers 0 … 255 (uint8) are seen as 0 … 1.
    """

    convolutions: tuple[tuple[int, int, int], ...]
    """(channels, kernel, stride) of each."""
    size: int
    """Features put out."""
    activation: str = "relu"

    def layers(self, shape: tuple[int, ...]) -> dict[str, Layer]:
        """Its layers for images of `shape` (H, W, C), for `init_layers`."""
        height, width, channels = shape
        layers: dict[str, Layer] = {}
        for i, (outputs, kernel, stride) in enumerate(self.convolutions):
            _check_layer(height, width, kernel, stride)
            layers[f"layer_{i}"] = Layer(kernel * kernel * channels, outputs, math.sqrt(2))
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
            channels = outputs
        layers["output"] = Layer(height * width * channels, self.size, math.sqrt(2))
        return layers

    def init(self, key: jax.Array, shape: tuple[int, ...]) -> Params:
        """New parameters for images of `shape` (H, W, C)."""
        return init_layers(key, self.layers(shape))

    def apply(self, params: Params, images: jax.Array) -> jax.Array:
        """Features of `images`."""
        activate = activation(self.activation)
        batch = images.shape[:-3]
        x = images.reshape(-1, *images.shape[-3:])
        for i, (_, kernel, stride) in enumerate(self.convolutions):
            x = activate(dense(params[f"layer_{i}"], as_floats(patches(x, kernel, stride))))
        x = as_floats(x).reshape(*batch, -1)
        return activate(dense(params["output"], x))


NATURE = CNN(convolutions=((32, 8, 4), (64, 4, 2), (64, 3, 1)), size=512)
"""For 84×84×4 frames, https://doi.org/10.1038/nature14236."""

SMALL = CNN(convolutions=((16, 3, 1),), size=128)
"""For 10×10×k images, https://arxiv.org/abs/1903.03176."""


def for_image(shape: tuple[int, ...]) -> CNN:
    """The network that suits images of `shape` (H, W, C)."""
    return NATURE if min(shape[:2]) >= 36 else SMALL


def patches(x: jax.Array, kernel: int, stride: int) -> jax.Array:
    """What each position of a kernel covers: [N, H, W, C] → [N, H', W', kernel² C]."""
    blocks = kernel // stride
    height, width = (x.shape[1] - kernel) // stride + 1, (x.shape[2] - kernel) // stride + 1
    rows, columns = height + blocks - 1, width + blocks - 1
    x = x[:, : rows * stride, : columns * stride]
    if stride > 1:
        x = x.reshape(-1, rows, stride, columns, stride, x.shape[-1])
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, rows, columns, stride * stride * x.shape[-1])
    shifted = [x[:, i : i + height, j : j + width] for i in range(blocks) for j in range(blocks)]
    return jnp.concatenate(shifted, axis=-1)


def as_floats(x: jax.Array) -> jax.Array:
    """float32, with integers 0 … 255 (uint8) scaled to 0 … 1."""
    if x.dtype == jnp.uint8:
        return x.astype(jnp.float32) * (1 / 255)
    return x.astype(jnp.float32)


def _check_layer(height: int, width: int, kernel: int, stride: int) -> None:
    if kernel % stride:
        raise UserError(
            f"A convolution's kernel must be a multiple of its stride, but a layer has kernel "
            f"{kernel} and stride {stride}: change one of them."
        )
    if min(height, width) < kernel:
        raise UserError(
            f"A convolution with kernel {kernel} got an image of {height}×{width}: give the "
            f"network larger images or smaller kernels."
        )
