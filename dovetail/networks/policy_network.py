"""Policy network: observation → features → hidden layers → action distribution parameters."""

from dataclasses import dataclass
from typing import Any

import jax

from dovetail.networks.encoder import Encoder, Network
from dovetail.networks.layers import Params
from dovetail.networks.mlp import MLP


@dataclass(frozen=True)
class PolicyNetwork:
    """Outputs [..., outputs] for observations with any leading axes; initially close to zero."""

    observation: Any
    """A pytree of jax.ShapeDtypeStruct, as in EnvSpec."""
    outputs: int
    hidden: tuple[int, ...] = (256, 256)
    activation: str = "relu"
    network: Network = "auto"
    """How observations are encoded: see `Encoder`."""

    def init(self, key: jax.Array) -> Params:
        """New parameters."""
        encoder = Encoder(self.observation, self.network)
        return encoder.init_with(key, {"policy": self._tower().layers(encoder.size)})

    def apply(self, params: Params, observation: Any) -> jax.Array:
        """Outputs [..., outputs]."""
        features = Encoder(self.observation, self.network).apply(params["encoder"], observation)
        return self._tower().apply(params["policy"], features)

    def _tower(self) -> MLP:
        return MLP((*self.hidden, self.outputs), self.activation, output_scale=0.01)
