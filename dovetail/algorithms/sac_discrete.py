"""Soft actor-critic for discrete actions, https://arxiv.org/abs/1910.07207.

The critics value every action at once, so expectations over the policy are sums, not samples.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dovetail.algorithm import Carry, Metrics, Timestep
from dovetail.algorithms.off_policy import Acted, Acting, Batch, LearnerState
from dovetail.algorithms.sac import SAC
from dovetail.envs.interface import Discrete
from dovetail.errors import check_option
from dovetail.functions.distributions import Categorical
from dovetail.networks.critics import Critics, of_actions
from dovetail.networks.policy_network import PolicyNetwork


@dataclass(frozen=True)
class SACDiscrete(SAC):
    """Soft actor-critic among few actions."""

    actions: ClassVar[tuple[type, ...]] = (Discrete,)

    target_rate: float = 0.02
    """How far the target networks move toward the networks with each gradient step."""
    entropy_per_action: float = 0.6
    """The entropy at which the temperature is to keep the policy, as a share of the highest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        share = self.entropy_per_action
        check_option("entropy_per_action", share, 0 <= share <= 1, "0 to 1")

    @property
    def choices(self) -> int:
        """How many actions there are."""
        assert isinstance(self.task.env.action, Discrete)
        return self.task.env.action.n

    @property
    def actor(self) -> PolicyNetwork:
        """The policy's network: a logit for each action."""
        observation = self.task.env.observation
        return PolicyNetwork(observation, self.choices, self.hidden, self.activation)

    @property
    def critic(self) -> Critics:
        """The critics' networks: a value for each action."""
        return self._critics(0, self.choices)

    @property
    def target_entropy(self) -> float:
        """The entropy at which the temperature is to keep the policy."""
        return self.entropy_per_action * math.log(self.choices)

    def choice(self, params: Any, observation: Any) -> Categorical:
        """The distribution of actions."""
        return Categorical(self.actor.apply(params, observation))

    def act(
        self, params: Acting, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[jax.Array, Acted, Carry]:
        """An action of the policy; any action at first."""
        observation = self.normalized(params.moments, timestep.observation)
        choice = self.choice(params.network, observation)
        action = choice.sample(key)
        return *self.acted(params, key, action, choice.log_prob(action)), carry

    def log_prob(
        self, params: Acting, carry: Carry, timestep: Timestep, action: jax.Array
    ) -> jax.Array:
        """By the policy; evenly at first."""
        observation = self.normalized(params.moments, timestep.observation)
        chance = self.choice(params.network, observation).log_prob(action)
        return self.acted_log_prob(params, chance)

    def greedy(self, params: Acting, carry: Carry, timestep: Timestep) -> tuple[jax.Array, Carry]:
        """The likeliest action."""
        observation = self.normalized(params.moments, timestep.observation)
        return self.choice(params.network, observation).mode(), carry

    def goal(self, state: LearnerState, batch: Batch, keys: jax.Array) -> jax.Array:
        """What the critics should say [n]: rewards, and the soft value that targets expect."""
        log_probs = jax.nn.log_softmax(self.actor.apply(state.params["actor"], batch.following))
        targets = self.some(state.target["critics"], keys[1])
        values = self.critic.apply(targets, batch.following, key=keys[2]).min(axis=0)
        temperature = jnp.exp(state.params["log_temperature"])
        soft = jnp.sum(jnp.exp(log_probs) * (values - temperature * log_probs), axis=-1)
        return batch.reward + batch.discount * soft

    def critic_loss(
        self, params: Any, batch: Batch, goal: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        """Squared errors of the values of what was done, summed over the critics."""
        values = self.critic.apply(params, batch.observation, key=key)
        taken = of_actions(values, batch.action)
        errors = taken - goal
        loss = jnp.mean(batch.weights * jnp.sum(jnp.square(errors), axis=0))
        metrics = {"critic_loss": loss, "value": jnp.mean(taken)}
        return loss, (jnp.mean(jnp.abs(errors), axis=0), metrics)

    def actor_loss(
        self, params: Any, state: LearnerState, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """What entropy lacks of its worth, and value."""
        log_probs = jax.nn.log_softmax(self.actor.apply(params, batch.observation))
        values = self.critic.apply(state.params["critics"], batch.observation, key=key)
        value = values.mean(axis=0) if self.mean_critic else values.min(axis=0)
        temperature = jnp.exp(state.params["log_temperature"])
        probabilities = jnp.exp(log_probs)
        loss = jnp.mean(jnp.sum(probabilities * (temperature * log_probs - value), axis=-1))
        entropy = -jnp.mean(jnp.sum(probabilities * log_probs, axis=-1))
        return loss, {"actor_loss": loss, "entropy": entropy, "temperature": temperature}
