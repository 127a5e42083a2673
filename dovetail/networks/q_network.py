"""The network of action values: observation → features → (memory) → hidden layers → outputs.

Each action has one output, its value, or several that tell the distribution of its return. `apply`
is for networks without a memory, with any leading axes; `step` and `unroll` are for acting and
learning with one.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.networks.encoder import Encoder
from dovetail.networks.layers import Params, init_layers
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
    duelling: bool = False
    """Whether a state's value and the actions' advantages are apart,
    https://arxiv.org/abs/1511.06581."""
    outputs: int = 1
    """Numbers for each action."""
    noisy: bool = False
    """Whether the hidden and last layers' weights deviate when a key is given,
    https://arxiv.org/abs/1706.10295."""
    recurrent: int = 0
    """Size of the memory between features and hidden layers; 0 for none."""

    def init(self, key: jax.Array) -> Params:
        """New parameters."""
        encoder = Encoder(self.observation)
        layers: dict[str, Any] = {"encoder": encoder.layers()}
        if self.recurrent:
            layers["memory"] = GRU(self.recurrent).layers(encoder.size)
        layers |= {name: tower.layers(self._features) for name, tower in self._towers().items()}
        return init_layers(key, layers)

    def initial_carry(self) -> Any:
        """The memory at the start of an episode: empty without one."""
        return GRU(self.recurrent).initial_carry() if self.recurrent else ()

    def apply(self, params: Params, observation: Any, key: jax.Array | None = None) -> jax.Array:
        """Every action's outputs; with a key the weights of a noisy network deviate."""
        features = Encoder(self.observation).apply(params["encoder"], observation)
        return self._heads(params, features, key)

    def step(self, params: Params, carry: Any, observation: Any) -> tuple[jax.Array, Any]:
        """(outputs, carry) at one time step of any leading axes."""
        features = Encoder(self.observation).apply(params["encoder"], observation)
        carry = GRU(self.recurrent).step(params["memory"], carry, features)
        return self._heads(params, carry), carry

    def unroll(
        self, params: Params, carry: Any, observations: Any, first: jax.Array
    ) -> tuple[jax.Array, Any]:
        """(outputs, carries) [T, B, …] of observations [T, B, …].

        `carry` [B, …] is the one before row 0; where `first` is true it is the initial one again.
        """
        features = Encoder(self.observation).apply(params["encoder"], observations)
        carries = GRU(self.recurrent).unroll(params["memory"], carry, features, first)
        return self._heads(params, carries), carries

    def _heads(self, params: Params, features: jax.Array, key: Any = None) -> jax.Array:
        towers, noise = self._towers(), {}
        if key is not None and self.noisy:
            sizes = [tower.noise(self._features) for tower in towers.values()]
            drawn = jax.random.normal(key, (sum(sizes),))
            noise = dict(zip(towers, jnp.split(drawn, sizes[:-1]), strict=True))
        found = {
            name: tower.apply(params[name], features, noise.get(name))
            for name, tower in towers.items()
        }
        shape = *features.shape[:-1], self.actions, self.outputs
        outputs = found["advantage"].reshape(shape)
        if self.duelling:
            state = found["value"][..., None, :]
            outputs = state + outputs - outputs.mean(axis=-2, keepdims=True)
        return outputs

    @property
    def _features(self) -> int:
        return self.recurrent or Encoder(self.observation).size

    def _towers(self) -> dict[str, MLP]:
        counts = {"advantage": self.actions * self.outputs}
        if self.duelling:
            counts["value"] = self.outputs
        return {
            name: MLP((*self.hidden, count), self.activation, noisy=self.noisy)
            for name, count in counts.items()
        }
