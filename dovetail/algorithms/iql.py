"""Implicit Q-learning, https://arxiv.org/abs/2110.06169.

A value network learns a high expectile of what the recorded actions are worth, which stands for
the best of them; so the critics never judge an action that nobody tried. The policy is fitted to
the recorded actions by their advantages. Unusual here: discrete actions as well, all gradients of
a step are taken at the same weights, and the policy's learning rate does not fall.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.algorithm import RL, Metrics
from dovetail.algorithms.cloning import AdvantageWeighted
from dovetail.algorithms.off_policy import Batch, LearnerState
from dovetail.errors import check_option
from dovetail.functions.offline import expectile_loss
from dovetail.networks.critics import Critics


@dataclass(frozen=True)
class IQL(AdvantageWeighted):
    """Implicit Q-learning: the best of what was recorded, by expectiles."""

    expectile: float = 0.7
    """Which expectile of the actions' values a state is worth: 0.5 their mean, near 1 their
    maximum."""
    inverse_temperature: float = 3.0
    """How much the better actions are preferred: 0 makes all alike, as in behavioral cloning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expectile = self.expectile
        check_option("expectile", expectile, 0 < expectile < 1, "more than 0, less than 1")

    @property
    def valuer(self) -> Critics:
        """The network of the states' values."""
        return Critics(self.task.env.observation, 0, 1, 1, self.hidden, self.activation)

    def networks(self, key: jax.Array) -> dict[str, Any]:
        """New parameters of the policy, the critics and the states' value."""
        keys = jax.random.split(key, 3)
        return {
            "actor": self.new_policy(keys[0]),
            "critics": self.critic.init(keys[1]),
            "value": self.valuer.init(keys[2]),
        }

    def value(self, params: Any, observation: Any) -> jax.Array:
        """What states are worth [n]."""
        return self.valuer.apply(params, observation)[0, :, 0]

    def value_loss(
        self, params: Any, batch: Batch, worth: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """(loss, advantages [n]): how far values are from the expectile of what the recorded
        actions are worth [n], and how much better than the values these are."""
        advantages = worth - self.value(params, batch.observation)
        loss = jnp.mean(batch.weights * expectile_loss(advantages, self.expectile))
        return loss, advantages

    def actor_loss(
        self, params: Any, batch: Batch, advantages: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Minus the log-likelihood of the recorded actions, by their advantages."""
        return self.weighted(self.policy(params, batch.observation), batch, advantages)

    def gradient_step(
        self, rl: RL, state: LearnerState, batch: Batch, keys: jax.Array
    ) -> tuple[LearnerState, jax.Array, Metrics]:
        """Value, critics and policy one step along their gradients; then the targets follow."""
        params = state.params
        worth = self.values(state.target["critics"], batch.observation, batch.action).min(axis=0)
        (lost, advantages), value = jax.value_and_grad(self.value_loss, has_aux=True)(
            params["value"], batch, worth
        )
        goal = batch.reward + batch.discount * self.value(params["value"], batch.following)
        critics, (errors, found) = jax.grad(self.critic_loss, has_aux=True)(
            params["critics"], batch, goal
        )
        actor, metrics = jax.grad(self.actor_loss, has_aux=True)(params["actor"], batch, advantages)
        gradients = {"actor": actor, "critics": critics, "value": value}
        after = self.follow(self.descend(rl, state, gradients))
        return after, errors, found | metrics | {"expectile_loss": lost}
