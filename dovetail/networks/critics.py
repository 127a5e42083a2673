"""An ensemble of independent critics of an observation and, optionally, an action.

Parameters are stacked, [count, …] in every leaf, and the layers of all critics are applied
together. With layer normalization and dropout after every hidden layer they are DroQ's critics,
https://arxiv.org/abs/2110.02034.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.keys import on_axis
from dovetail.networks.encoder import Encoder, Network
from dovetail.networks.layers import Params, activation, dense_each, init_layers
from dovetail.networks.mlp import MLP


@dataclass(frozen=True)
class Critics:
    """Outputs [count, n, outputs] for observations and actions with one leading axis [n]."""

    observation: Any
    """A pytree of jax.ShapeDtypeStruct, as in EnvSpec."""
    action: int
    """Size of the action vector; 0 for discrete actions, with one output per action."""
    outputs: int = 1
    count: int = 2
    hidden: tuple[int, ...] = (256, 256)
    activation: str = "relu"
    layer_norm: bool = False
    """Whether to normalize each hidden layer before its activation."""
    dropout: float = 0.0
    """Fraction of each hidden layer's outputs dropped, when a key is given."""
    network: Network = "auto"
    """How observations are encoded: see `Encoder`."""

    def init(self, key: jax.Array) -> Params:
        """New parameters. Each network is drawn separately and then stacked: a batched QR
        decomposition can hang in XLA while another program runs."""
        encoder = Encoder(self.observation, self.network)
        tower = MLP((*self.hidden, self.outputs), self.activation)
        layers = {
            "encoder": encoder.layers(),
            "critic": tower.layers(encoder.size + self.action),
        }
        drawn = init_layers(key, {f"critic_{i}": layers for i in range(self.count)})
        if encoder.own is not None:
            for i, one in enumerate(drawn.values()):
                one["encoder"] = encoder.init(jax.random.fold_in(key, i + 1))
        params = jax.tree.map(lambda *each: jnp.stack(each), *drawn.values())
        if self.layer_norm:
            params["norms"] = {
                f"layer_{i}": {
                    "scale": jnp.ones((self.count, size)),
                    "bias": jnp.zeros((self.count, size)),
                }
                for i, size in enumerate(self.hidden)
            }
        return params

    def apply(
        self, params: Params, observation: Any, action: Any = None, key: Any = None
    ) -> jax.Array:
        """Outputs [count, n, outputs], with `count` taken from the parameters (a subset of the
        ensemble works too). Dropout is applied only if `key` is given."""
        x = self._features(params, observation)
        if action is not None:
            # All critics see the same actions.
            x = jnp.concatenate([x, jnp.broadcast_to(action, (len(x), *action.shape))], axis=-1)
        for i in range(len(self.hidden)):
            x = dense_each(params["critic"][f"layer_{i}"], x)
            if self.dropout and key is not None:
                x = _dropped(on_axis(jax.random.fold_in(key, i), 1), x, self.dropout)
            if self.layer_norm:
                x = _normalized(params["norms"][f"layer_{i}"], x)
            x = activation(self.activation)(x)
        return dense_each(params["critic"][f"layer_{len(self.hidden)}"], x)

    def _features(self, params: Params, observation: Any) -> jax.Array:
        """[count, n, size]; an encoder without parameters runs once for all."""
        encode = Encoder(self.observation, self.network).apply
        # Image encoders are separate for each critic, like the rest of it.
        if jax.tree.leaves(params["encoder"]):
            return jax.vmap(encode, (0, None))(params["encoder"], observation)
        features = encode({}, observation)
        return jnp.broadcast_to(
            features, (len(params["critic"]["layer_0"]["bias"]), *features.shape)
        )


def of_actions(values: jax.Array, action: jax.Array) -> jax.Array:
    """The values [critics, n] of the actions taken, int32[n], from values [critics, n, actions]."""
    return jnp.take_along_axis(values, action[None, :, None], axis=-1)[..., 0]


def _normalized(params: Params, x: jax.Array) -> jax.Array:
    """Layer normalization along the last axis, https://arxiv.org/abs/1607.06450."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(variance + 1e-6)
    return scaled * params["scale"][:, None] + params["bias"][:, None]


def _dropped(key: jax.Array, x: jax.Array, share: float) -> jax.Array:
    """Inverted dropout: zeroes a fraction `share` of the entries and scales up the rest."""
    kept = jax.random.uniform(key, x.shape) >= share
    return jnp.where(kept, x / (1.0 - share), 0.0)
