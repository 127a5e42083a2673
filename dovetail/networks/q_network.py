"""The network of action values: observation → features → hidden layers → a value per action."""

from dataclasses import dataclass
from typing import Any

import jax

from dovetail.networks.encoder import Encoder
from dovetail.networks.layers import Params, init_layers
from dovetail.networks.mlp import MLP


@dataclass(frozen=True)
class QNetwork:
    """Values [..., actions] of observations with any leading axes."""

    observation: Any
    """A pytree of jax.ShapeDtypeStruct, as in EnvSpec."""
    actions: int
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "relu"
    duelling: bool = False
    """Whether a state's value and the actions' advantages are apart,
    https://arxiv.org/abs/1511.06581."""

    def init(self, key: jax.Array) -> Params:
        """New parameters."""
        encoder = Encoder(self.observation)
        layers: dict[str, Any] = {"encoder": encoder.layers()}
        layers["advantage"] = self._tower(self.actions).layers(encoder.size)
        if self.duelling:
            layers["value"] = self._tower(1).layers(encoder.size)
        return init_layers(key, layers)

    def apply(self, params: Params, observation: Any) -> jax.Array:
        """The value of every action."""
        features = Encoder(self.observation).apply(params["encoder"], observation)
        values = self._tower(self.actions).apply(params["advantage"], features)
        if self.duelling:
            state = self._tower(1).apply(params["value"], features)
            values = state + values - values.mean(axis=-1, keepdims=True)
        return values

    def _tower(self, outputs: int) -> MLP:
        return MLP((*self.hidden, outputs), self.activation)
