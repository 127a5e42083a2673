"""Distributed distributional deterministic policy gradient, https://arxiv.org/abs/1804.08617.

DDPG whose critic learns the distribution of returns over fixed atoms, from several steps at a time.
Its many actors are the strategy's business: under `actor-learner`, with priorities, it
is Ape-X DDPG, https://arxiv.org/abs/1803.00933.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.algorithm import Metrics
from dovetail.algorithms.ddpg import DDPG
from dovetail.algorithms.off_policy import Batch, LearnerState
from dovetail.errors import check_option
from dovetail.functions.value_distributions import atoms, cross_entropy, expected, project
from dovetail.networks.critics import Critics


@dataclass(frozen=True)
class D4PG(DDPG):
    """DDPG with a critic of distributions, learned from several steps at a time."""

    n_step: int = 3
    """Steps whose rewards are taken as they were before a value stands for the rest."""
    atoms: int = 101
    """Returns among which the critic spreads its belief."""
    value_min: float = -500.0
    """The lowest of these returns; lower ones count as it."""
    value_max: float = 500.0
    """The highest of these returns; higher ones count as it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("atoms", self.atoms, self.atoms >= 2, "2 or more")
        low, high = self.value_min, self.value_max
        check_option("value_max", high, high > low, f"more than --value-min, which is {low}")

    @property
    def critic(self) -> Critics:
        """The critic's network, with a logit for each atom."""
        env = self.task.env
        size: int = env.action.size  # type: ignore[union-attr]
        return Critics(env.observation, size, self.atoms, 1, self.hidden, self.activation)

    @property
    def support(self) -> jax.Array:
        """The atoms [k]."""
        return atoms(self.value_min, self.value_max, self.atoms)

    def values(self, params: Any, observation: Any, action: jax.Array) -> jax.Array:
        """What the critic expects of actions, [1, n]."""
        return expected(self.critic.apply(params, observation, action), self.support)

    def goal(self, state: LearnerState, batch: Batch, keys: jax.Array) -> jax.Array:
        """What the critic should say [n, k]: the target's distribution, moved by the rewards."""
        action = self.policy(state.target["actor"], batch.following)
        logits = self.critic.apply(state.target["critics"], batch.following, action)[0]
        moved = batch.reward[:, None] + batch.discount[:, None] * self.support
        return project(moved, jax.nn.softmax(logits), self.support)

    def critic_loss(
        self, params: Any, batch: Batch, goal: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        """The cross-entropy of distributions, which is each transition's error too."""
        logits = self.critic.apply(params, batch.observation, batch.action)[0]
        errors = cross_entropy(logits, goal)
        loss = jnp.mean(batch.weights * errors)
        metrics = {"critic_loss": loss, "value": jnp.mean(expected(logits, self.support))}
        return loss, (errors, metrics)
