"""Advantage-weighted actor-critic, https://arxiv.org/abs/2006.09359.

The critics judge what the policy would do next; the policy is fitted to recorded actions by how
much better these are than its own. It learns from recorded data and goes on in the environment in
the same way. Unusual here: weights are cut off instead of normalized over a batch, and among
discrete actions the policy's value is an expectation, not a sample.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.algorithm import RL, Metrics
from dovetail.algorithms.cloning import AdvantageWeighted
from dovetail.algorithms.off_policy import Batch, LearnerState
from dovetail.functions.distributions import Categorical, Gaussian


@dataclass(frozen=True)
class AWAC(AdvantageWeighted):
    """Advantage-weighted actor-critic: what was recorded, if it beats the policy's own."""

    def networks(self, key: jax.Array) -> dict[str, Any]:
        """New parameters of the policy and the critics."""
        keys = jax.random.split(key)
        return {"actor": self.new_policy(keys[0]), "critics": self.critic.init(keys[1])}

    def expected(
        self, critics: Any, observation: Any, policy: Categorical | Gaussian, key: jax.Array
    ) -> jax.Array:
        """What the lowest critic expects of a policy's actions [n]."""
        if isinstance(policy, Categorical):
            values = self.critic.apply(critics, observation).min(axis=0)
            return jnp.sum(jax.nn.softmax(policy.logits) * values, axis=-1)
        return self.values(critics, observation, self.drawn(policy, key)).min(axis=0)

    def goal(self, state: LearnerState, batch: Batch, key: jax.Array) -> jax.Array:
        """What the critics should say [n]: rewards, and what targets expect of the policy."""
        policy = self.policy(state.params["actor"], batch.following)
        following = self.expected(state.target["critics"], batch.following, policy, key)
        return batch.reward + batch.discount * following

    def actor_loss(
        self, params: Any, critics: Any, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Minus the log-likelihood of the recorded actions, by their advantages."""
        policy = self.policy(params, batch.observation)
        fixed = jax.lax.stop_gradient(policy)
        taken = self.values(critics, batch.observation, batch.action).min(axis=0)
        usual = self.expected(critics, batch.observation, fixed, key)
        return self.weighted(policy, batch, taken - usual)

    def gradient_step(
        self, rl: RL, state: LearnerState, batch: Batch, keys: jax.Array
    ) -> tuple[LearnerState, jax.Array, Metrics]:
        """Critics and policy one step along their gradients; then the target networks follow."""
        goal = self.goal(state, batch, keys[0])
        critics, (errors, found) = jax.grad(self.critic_loss, has_aux=True)(
            state.params["critics"], batch, goal
        )
        actor, metrics = jax.grad(self.actor_loss, has_aux=True)(
            state.params["actor"], state.params["critics"], batch, keys[1]
        )
        after = self.descend(rl, state, {"actor": actor, "critics": critics})
        return self.follow(after), errors, found | metrics
