"""Encodes an observation (a vector, an image, or a dict of them) as one feature vector."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.errors import UserError
from dovetail.networks import cnn
from dovetail.networks.layers import Layer, Params, init_layers


@dataclass(frozen=True)
class Encoder:
    """Images go through a convolutional network, other leaves are flattened; all are concatenated.

    A leaf is an image if it has three axes, or two and dtype uint8; channels may come first.
    """

    observation: Any
    """A pytree of jax.ShapeDtypeStruct, as in EnvSpec."""

    @property
    def size(self) -> int:
        """Number of output features."""
        return sum(
            cnn.for_image(_image_shape(leaf)).size if _is_image(leaf) else math.prod(leaf.shape)
            for leaf in self._leaves().values()
        )

    def layers(self) -> dict[str, dict[str, Layer]]:
        """Layers of each image's network, keyed by the image's name, to pass to `init_layers`."""
        return {
            name: cnn.for_image(_image_shape(leaf)).layers(_image_shape(leaf))
            for name, leaf in self._leaves().items()
            if _is_image(leaf)
        }

    def init(self, key: jax.Array) -> Params:
        """New parameters."""
        return init_layers(key, self.layers())

    def apply(self, params: Params, observation: Any) -> jax.Array:
        """Features [..., size] of an observation with any leading axes."""
        arrays = jax.tree.leaves(observation)
        features = [
            self._features(params.get(name), leaf, array)
            for (name, leaf), array in zip(self._leaves().items(), arrays, strict=True)
        ]
        return features[0] if len(features) == 1 else jnp.concatenate(features, axis=-1)

    def _features(self, params: Params | None, leaf: Any, array: jax.Array) -> jax.Array:
        batch = array.shape[: array.ndim - len(leaf.shape)]
        if params is None:
            return cnn.as_floats(array).reshape(*batch, -1)
        shape = _image_shape(leaf)
        if leaf.shape != shape and len(leaf.shape) == 3:
            # Channels come first in this observation.
            array = jnp.moveaxis(array, -3, -1)
        return cnn.for_image(shape).apply(params, array.reshape(*batch, *shape))

    def _leaves(self) -> dict[str, Any]:
        """The observation's leaves by name; a bare array is called "observation"."""
        leaves = jax.tree_util.tree_leaves_with_path(self.observation)
        return {
            jax.tree_util.keystr(path, simple=True, separator="/") or "observation": leaf
            for path, leaf in leaves
        }


def _is_image(leaf: Any) -> bool:
    if len(leaf.shape) > 3:
        raise UserError(
            f"An observation has shape {leaf.shape}: stack frames along an image's channels, so "
            f"that it has three axes."
        )
    return len(leaf.shape) == 3 or (len(leaf.shape) == 2 and leaf.dtype == jnp.uint8)


def _image_shape(leaf: Any) -> tuple[int, ...]:
    """(H, W, C); the first axis holds the channels if it is shorter than the last."""
    if len(leaf.shape) == 2:
        return (*leaf.shape, 1)
    first, middle, last = leaf.shape
    return (middle, last, first) if first < last else (first, middle, last)
