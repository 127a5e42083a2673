"""Q-network: observation → features → (memory) → hidden layers → outputs.

Each action has one output, its value, or several that describe its return distribution. `apply` is
for networks without memory, with any leading axes; `step` and `unroll` are for acting and learning
with memory.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.networks.encoder import Encoder, Network
from dovetail.networks.layers import Params
from dovetail.networks.mlp import MLP
from dovetail.networks.recurrent import GRU


@dataclass(frozen=True)
class QNetwork:
    """Outputs [..., actions, outputs] of observations with any leading axes."""

    observation: Any
    """A pytree of jax.ShapeDtypeStruct, as in EnvSpec."""
    actions: int
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "relu"
    dueling: bool = False
    """Whether state value and action advantages have separate towers,
    https://arxiv.org/abs/1511.06581."""
    outputs: int = 1
    """Outputs per action."""
    noisy: bool = False
    """Whether dense layers are noisy when noise is given, https://arxiv.org/abs/1706.10295. A layer
    that reads a raw vector stays noiseless: noise would drown its small inputs."""
    recurrent: int = 0
    """Size of the memory between features and hidden layers; 0 for none."""
    network: Network = "auto"
    """How observations are encoded: see `Encoder`."""

    def init(self, key: jax.Array) -> Params:
        """New parameters."""
        encoder = Encoder(self.observation, self.network)
        layers: dict[str, Any] = {}
        if self.recurrent:
            layers["memory"] = GRU(self.recurrent).layers(encoder.size)
        layers |= {name: tower.layers(self._features) for name, tower in self._towers().items()}
        return encoder.init_with(key, layers)

    def initial_carry(self) -> Any:
        """The carry at the start of an episode; empty without memory."""
        return GRU(self.recurrent).initial_carry() if self.recurrent else ()

    @property
    def noise(self) -> int:
        """Number of normal samples that `apply` takes as its noise."""
        return sum(self._noises())

    def apply(self, params: Params, observation: Any, noise: jax.Array | None = None) -> jax.Array:
        """Outputs of every action [..., actions, outputs]; `noise` holds normal samples for a noisy
        network.

        Draw the noise outside a loop over batches: XLA would draw it again for every item.
        """
        features = Encoder(self.observation, self.network).apply(params["encoder"], observation)
        return self._heads(params, features, noise)

    def step(self, params: Params, carry: Any, observation: Any) -> tuple[jax.Array, Any]:
        """(outputs, carry) at one time step with any leading axes."""
        features = Encoder(self.observation, self.network).apply(params["encoder"], observation)
        carry = GRU(self.recurrent).step(params["memory"], carry, features)
        return self._heads(params, carry), carry

    def unroll(
        self, params: Params, carry: Any, observations: Any, first: jax.Array
    ) -> tuple[jax.Array, Any]:
        """(outputs, carries) [T, B, …] of observations [T, B, …].

        `carry` [B, …] precedes row 0; it is reset to the initial carry where `first` [T, B] is
        true.
        """
        features = Encoder(self.observation, self.network).apply(params["encoder"], observations)
        carries = GRU(self.recurrent).unroll(params["memory"], carry, features, first)
        return self._heads(params, carries), carries

    def _heads(
        self, params: Params, features: jax.Array, noise: jax.Array | None = None
    ) -> jax.Array:
        towers = self._towers()
        parts: list[Any] = [None] * len(towers)
        if noise is not None:
            parts = jnp.split(noise, self._noises()[:-1])
        found = {
            name: tower.apply(params[name], features, part)
            for (name, tower), part in zip(towers.items(), parts, strict=True)
        }
        shape = *features.shape[:-1], self.actions, self.outputs
        outputs = found["advantage"].reshape(shape)
        if self.dueling:
            state = found["value"][..., None, :]
            # Subtracting the mean advantage makes value and advantages identifiable.
            outputs = state + outputs - outputs.mean(axis=-2, keepdims=True)
        return outputs

    @property
    def _features(self) -> int:
        return self.recurrent or Encoder(self.observation, self.network).size

    def _noises(self) -> list[int]:
        return [tower.noise(self._features) for tower in self._towers().values()]

    def _towers(self) -> dict[str, MLP]:
        counts = {"advantage": self.actions * self.outputs}
        if self.dueling:
            counts["value"] = self.outputs
        return {
            name: MLP((*self.hidden, count), self.activation, noisy_from=self._noisy_from)
            for name, count in counts.items()
        }

    @property
    def _noisy_from(self) -> int | None:
        if not self.noisy:
            return None
        reads_features = self.recurrent or Encoder(self.observation, self.network).learned
        return 0 if reads_features else min(1, len(self.hidden))
