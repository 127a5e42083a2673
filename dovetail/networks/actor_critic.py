"""Actor-critic network: observation → features → (memory) → policy and value heads.

`step` is for acting: one time step with any leading axes. `unroll` is for learning over [T, B];
without memory, the network is applied to all rows at once. On a CPU two separate towers are faster
than any way of stacking them into one (measured inside a scan of gradient steps).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.envs.interface import ActionSpace, Continuous
from dovetail.functions.distributions import Distribution, from_network, output_size
from dovetail.networks.encoder import Encoder, Network
from dovetail.networks.layers import Params
from dovetail.networks.mlp import MLP
from dovetail.networks.recurrent import GRU

Carry = Any


@dataclass(frozen=True)
class ActorCritic:
    """A distribution over actions and a value for each observation."""

    observation: Any
    """A pytree of jax.ShapeDtypeStruct, as in EnvSpec."""
    action: ActionSpace
    hidden: tuple[int, ...] = (64, 64)
    """Sizes of the hidden layers between features and heads."""
    activation: str = "tanh"
    recurrent: int = 0
    """Size of the memory between features and hidden layers; 0 for none."""
    shared: bool = False
    """Whether policy and value share the hidden layers; image features are always shared."""
    network: Network = "auto"
    """How observations are encoded: see `Encoder`."""

    def init(self, key: jax.Array) -> Params:
        """New parameters; policy outputs are small, so the initial policy is nearly uniform."""
        encoder = Encoder(self.observation, self.network)
        layers: dict[str, Any] = {}
        size = encoder.size
        if self.recurrent:
            layers["memory"] = GRU(self.recurrent).layers(size)
            size = self.recurrent
        if self.shared and self.hidden:
            layers["trunk"] = self._trunk().layers(size)
            size = self.hidden[-1]
        layers["policy"] = self._policy().layers(size)
        layers["value"] = self._value().layers(size)
        params = encoder.init_with(key, layers)
        if isinstance(self.action, Continuous):
            # A learned standard deviation, independent of the state; initially 1.
            params["log_std"] = jnp.zeros(self.action.size)
        return params

    def initial_carry(self) -> Carry:
        """The carry at the start of an episode; empty without memory."""
        return GRU(self.recurrent).initial_carry() if self.recurrent else ()

    def step(
        self, params: Params, carry: Carry, observation: Any
    ) -> tuple[Distribution, jax.Array, Carry]:
        """(distribution, value [...], carry) at one time step with any leading axes [...]."""
        features = Encoder(self.observation, self.network).apply(params["encoder"], observation)
        if self.recurrent:
            features = carry = GRU(self.recurrent).step(params["memory"], carry, features)
        return *self._heads(params, features), carry

    def unroll(
        self, params: Params, carry: Carry, observations: Any, first: jax.Array
    ) -> tuple[Distribution, jax.Array]:
        """(distribution, values) [T, B] of observations [T, B, …].

        `carry` [B, …] precedes row 0; it is reset to the initial carry where `first` [T, B] is
        true.
        """
        features = Encoder(self.observation, self.network).apply(params["encoder"], observations)
        if self.recurrent:
            features = GRU(self.recurrent).unroll(params["memory"], carry, features, first)
        return self._heads(params, features)

    def _heads(self, params: Params, features: jax.Array) -> tuple[Distribution, jax.Array]:
        if "trunk" in params:
            features = self._trunk().apply(params["trunk"], features)
        outputs = self._policy().apply(params["policy"], features)
        value = self._value().apply(params["value"], features)[..., 0]
        return from_network(self.action, outputs, params.get("log_std", 0.0)), value

    def _trunk(self) -> MLP:
        return MLP(self.hidden, self.activation, activate_output=True)

    def _policy(self) -> MLP:
        hidden = () if self.shared else self.hidden
        return MLP((*hidden, output_size(self.action)), self.activation, output_scale=0.01)

    def _value(self) -> MLP:
        hidden = () if self.shared else self.hidden
        return MLP((*hidden, 1), self.activation, output_scale=1.0)
