"""Encodes an observation (a vector, an image, or a dict of them) as one feature vector."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.errors import UserError, nearest
from dovetail.networks import cnn
from dovetail.networks.impala import ResidualCNN
from dovetail.networks.layers import Layer, Params, init_layers
from dovetail.networks.own import OwnNetwork

Network = Any
"""The option `network` of algorithms: a name in `NETWORKS`, "file.py:Name" or "module:Name", or a
class or object as `OwnNetwork` takes it."""

NETWORKS = ("auto", "mlp", "cnn", "impala")
"""`auto` is `cnn` for images and `mlp` for the rest of an observation."""


@dataclass(frozen=True)
class Encoder:
    """Images go through a convolutional network, other leaves are flattened; all are concatenated.

    A leaf is an image if it has three axes, or two and dtype uint8; channels may come first.
    """

    observation: Any
    """A pytree of jax.ShapeDtypeStruct, as in EnvSpec."""
    network: Network = "auto"
    """How images are encoded; `mlp` flattens them too. A user's own network sees everything."""

    @property
    def own(self) -> OwnNetwork | None:
        """The user's network; None for one of ours."""
        if isinstance(self.network, str) and ":" not in self.network:
            if self.network not in NETWORKS:
                raise UserError(
                    f"There is no network {self.network!r}: {nearest(self.network, NETWORKS)}"
                )
            return None
        return OwnNetwork(self.network, self.observation)

    @property
    def learned(self) -> bool:
        """Whether it has parameters."""
        return self.own is not None or bool(self.layers())

    @property
    def size(self) -> int:
        """Number of output features."""
        if (own := self.own) is not None:
            return own.size
        return sum(
            self._image_network(leaf).size if self._encodes(leaf) else math.prod(leaf.shape)
            for leaf in self._leaves().values()
        )

    def layers(self) -> dict[str, dict[str, Layer]]:
        """Layers of each image's network, keyed by the image's name, to pass to `init_layers`;
        none for a user's network, whose parameters `init` makes."""
        if self.own is not None:
            return {}
        images = {name: leaf for name, leaf in self._leaves().items() if self._encodes(leaf)}
        if self.network in ("cnn", "impala") and not images:
            shapes = ", ".join(str(leaf.shape) for leaf in self._leaves().values())
            raise UserError(
                f"The network {self.network} is for images, but the observation has the shape "
                f"{shapes}: use mlp, or auto."
            )
        return {
            name: self._image_network(leaf).layers(_image_shape(leaf))
            for name, leaf in images.items()
        }

    def init(self, key: jax.Array) -> Params:
        """New parameters."""
        own = self.own
        return own.init(key) if own is not None else init_layers(key, self.layers())

    def init_with(self, key: jax.Array, layers: dict[str, Any]) -> Params:
        """New parameters of the encoder, under "encoder", and of the layers that follow it."""
        params = init_layers(key, {"encoder": self.layers(), **layers})
        if self.own is not None:
            # Another key: a user's network may draw from it in any way.
            params["encoder"] = self.init(jax.random.fold_in(key, 1))
        return params

    def apply(self, params: Params, observation: Any) -> jax.Array:
        """Features [..., size] of an observation with any leading axes."""
        if (own := self.own) is not None:
            return own.apply(params, observation)
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
        return self._image_network(leaf).apply(params, array.reshape(*batch, *shape))

    def _encodes(self, leaf: Any) -> bool:
        """Whether a leaf has a network of its own."""
        return self.network != "mlp" and _is_image(leaf)

    def _image_network(self, leaf: Any) -> cnn.CNN | ResidualCNN:
        return ResidualCNN() if self.network == "impala" else cnn.for_image(_image_shape(leaf))

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
