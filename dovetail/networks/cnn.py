"""Convolutional networks for images, written as one matrix product per layer.

XLA's gradient of a convolution inside `lax.scan` is many times slower on a CPU than outside it;
a matrix product is equally fast in both. A kernel whose stride divides it is a few rows of blocks
of stride × stride pixels. Each row of blocks of the image is joined to what the kernel covers of it
and multiplied with all rows of the kernel at once, and the products are added where they belong:
that copies less than joining all that the kernel covers, which pays only for small kernels.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dovetail.errors import UserError
from dovetail.networks.layers import Layer, Params, activation, dense, init_layers

SMALL_PATCH = 128
"""Values up to which all that a kernel covers is joined: for the kernels of 10×10 images that is
1.5 times as fast, for those of Atari's frames 1.3 times as slow (gradients on two cores)."""


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
            x = activate(convolve(params[f"layer_{i}"], x, kernel, stride))
        x = as_floats(x).reshape(*batch, -1)
        return activate(dense(params["output"], x))


NATURE = CNN(convolutions=((32, 8, 4), (64, 4, 2), (64, 3, 1)), size=512)
"""For 84×84×4 frames, https://doi.org/10.1038/nature14236."""

SMALL = CNN(convolutions=((16, 3, 1),), size=128)
"""For 10×10×k images, https://arxiv.org/abs/1903.03176."""


def for_image(shape: tuple[int, ...]) -> CNN:
    """The network that suits images of `shape` (H, W, C)."""
    return NATURE if min(shape[:2]) >= 36 else SMALL


def convolve(params: Params, x: jax.Array, kernel: int, stride: int) -> jax.Array:
    """A convolution without padding: [N, H, W, C] → [N, H', W', outputs].

    The weight's rows are ordered by (block row, block column, row in the block, column in the
    block, channel).
    """
    blocks, outputs = kernel // stride, params["bias"].shape[0]
    weight = params["weight"].reshape(blocks, blocks, stride, -1, outputs)
    if len(params["weight"]) <= SMALL_PATCH:
        patches = as_floats(_join(x, blocks, stride, together=blocks))
        whole = weight.transpose(0, 2, 1, 3, 4).reshape(-1, outputs)
        return dense({"weight": whole, "bias": params["bias"]}, patches)
    joined = as_floats(_join(x, blocks, stride, together=1))
    by_row = weight.transpose(2, 1, 3, 0, 4).reshape(-1, blocks * outputs)
    products = (joined.reshape(-1, len(by_row)) @ by_row).reshape(
        *joined.shape[:-1], blocks, outputs
    )
    height = joined.shape[1] - blocks + 1
    return sum(products[:, i : i + height, :, i] for i in range(blocks)) + params["bias"]


def _join(x: jax.Array, blocks: int, stride: int, together: int) -> jax.Array:
    """What each position of a kernel covers of so many rows of blocks `together`.

    [N, H, W, C] → [N, rows, W', together × stride × blocks × stride × C].
    """
    count, height, width, channels = x.shape
    rows, columns = height // stride, width // stride
    x = x[:, : rows * stride, : columns * stride]
    x = x.reshape(count, rows, stride, columns, stride * channels)
    high, wide = rows - together + 1, columns - blocks + 1
    covered = [
        x[:, row : row + high, i, column : column + wide]
        for row in range(together)
        for i in range(stride)
        for column in range(blocks)
    ]
    return jnp.concatenate(covered, axis=-1)


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
