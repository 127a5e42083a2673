"""QR-DQN, https://arxiv.org/abs/1710.10044: DQN that learns the quantiles of the return.

The network puts out values of equal probability for each action, fitted by quantile regression;
their mean is the action's value. Unlike a distribution on fixed atoms it needs no range of returns
beforehand. It has DQN's options but for the distribution's.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dovetail.algorithms.value_based import Annealed
from dovetail.errors import check_option
from dovetail.functions.value_distributions import quantile_huber_loss
from dovetail.networks.q_network import QNetwork


@dataclass(frozen=True)
class QRDQN(Annealed):
    """Deep Q-learning of the return's quantiles."""

    huber: float = 1.0
    """Errors up to this count by their square, larger ones by their size."""
    quantiles: int = 32
    """Values of equal probability that stand for a return's distribution."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("quantiles", self.quantiles, self.quantiles >= 1, "1 or more")

    @property
    def network(self) -> QNetwork:
        """The network for the task's spaces; it puts out quantiles."""
        return dataclasses.replace(super().network, outputs=self.quantiles, noisy=self.noisy)

    def values(self, outputs: jax.Array) -> jax.Array:
        """The values [..., actions]: the means of the quantiles."""
        return outputs.mean(axis=-1)

    def compare(
        self, taken: jax.Array, reward: jax.Array, discount: jax.Array, following: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """(losses, errors) [n]: the loss of quantile regression, and how far the means differ."""
        goals = reward[:, None] + discount[:, None] * following
        errors = jnp.abs(taken.mean(axis=-1) - goals.mean(axis=-1))
        return quantile_huber_loss(taken, goals, self.huber), errors
