"""DQN, https://www.nature.com/articles/nature14236, with the parts of Rainbow as options.

Rainbow, https://arxiv.org/abs/1710.02298, is DQN with six extensions; each can be switched on
alone: `double`, `dueling`, `n_step`, `prioritized`, `distributional`, `noisy`. Unusual here: the
target network follows a little with each gradient step, rather than altogether now and then.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dovetail.algorithms.value_based import Annealed
from dovetail.errors import check_option
from dovetail.functions.value_distributions import (
    atoms,
    cross_entropy,
    divergence,
    expected,
    project,
)
from dovetail.networks.q_network import QNetwork


@dataclass(frozen=True)
class DQN(Annealed):
    """Deep Q-learning from a replay; each part of Rainbow can be switched on alone."""

    distributional: bool = False
    """Whether the return's distribution is learned, not its mean alone,
    https://arxiv.org/abs/1707.06887."""
    atoms: int = 51
    """Values on which that distribution stands."""
    value_low: float = -100.0
    """The lowest of them: no return should be lower."""
    value_high: float = 100.0
    """The highest of them: no return should be higher."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("atoms", self.atoms, self.atoms >= 2, "2 or more")
        above = self.value_high > self.value_low
        check_option("value_high", self.value_high, above, f"more than {self.value_low}")

    @property
    def network(self) -> QNetwork:
        """The network for the task's spaces; of a distribution it puts out the logits."""
        outputs = self.atoms if self.distributional else 1
        return dataclasses.replace(super().network, outputs=outputs, noisy=self.noisy)

    @property
    def support(self) -> jax.Array:
        """The values on which distributions stand."""
        return atoms(self.value_low, self.value_high, self.atoms)

    def values(self, outputs: jax.Array) -> jax.Array:
        """The values [..., actions], the means of distributions."""
        if not self.distributional:
            return super().values(outputs)
        return expected(outputs, self.support)

    def compare(
        self, taken: jax.Array, reward: jax.Array, discount: jax.Array, following: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """(losses, errors) [n]: Huber's loss of values, or the distributions' cross-entropy, with
        their divergence as the error."""
        if not self.distributional:
            return super().compare(taken, reward, discount, following)
        moved = reward[:, None] + discount[:, None] * self.support
        goal = project(moved, jax.nn.softmax(following), self.support)
        errors = jnp.maximum(
            divergence(jax.lax.stop_gradient(taken), goal), 0.0
        )  # but for rounding
        return cross_entropy(taken, goal), errors
