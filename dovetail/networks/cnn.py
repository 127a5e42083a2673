"""Convolutional networks for images, each layer written as one matrix product.

XLA's gradient of a convolution inside `lax.scan` is many times slower on a CPU than outside it; a
matrix product is equally fast in both. A kernel divisible by its stride is a grid of stride ×
stride blocks. For each row of blocks, the patches are concatenated and multiplied by all kernel
rows at once, and the products are summed with the right offsets. This copies less than
concatenating whole patches (im2col), which pays off only for small kernels.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dovetail.errors import UserError
from dovetail.networks.layers import Layer, Params, activation, dense, init_layers

SMALL_PATCH = 128
"""Maximum number of values per patch for concatenating whole patches: 1.5 times as fast for the
kernels of 10×10 images, 1.3 times as slow for those of Atari frames (gradients on two cores)."""


@dataclass(frozen=True)
class CNN:
    """Convolutions without padding, then a dense layer: [..., H, W, C] → [..., size].

    uint8 images (0 … 255) are scaled to 0 … 1.
    """

    convolutions: tuple[tuple[int, int, int], ...]
    """(channels, kernel, stride) of each layer."""
    size: int
    """Number of output features."""
    activation: str = "relu"

    def layers(self, shape: tuple[int, ...]) -> dict[str, Layer]:
        """Layer declarations for images of `shape` (H, W, C), to pass to `init_layers`."""
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
        """Features [..., size] of `images` [..., H, W, C]."""
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
    """The default network for images of `shape` (H, W, C)."""
    return NATURE if min(shape[:2]) >= 36 else SMALL


def convolve(params: Params, x: jax.Array, kernel: int, stride: int) -> jax.Array:
    """A convolution without padding: [N, H, W, C] → [N, H', W', outputs].

    The rows of the weight are ordered by (block row, block column, row within block, column within
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
    # Row i of the kernel's blocks meets the image i rows of blocks below the output position.
    return sum(products[:, i : i + height, :, i] for i in range(blocks)) + params["bias"]


def _join(x: jax.Array, blocks: int, stride: int, together: int) -> jax.Array:
    """Concatenates the pixels under each kernel position, over `together` consecutive rows of
    blocks.

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
    """float32; uint8 values are scaled from 0 … 255 to 0 … 1."""
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
