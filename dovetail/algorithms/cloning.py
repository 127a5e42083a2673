"""What the algorithms share that fit a policy to recorded actions by their likelihood.

The policy is a choice among discrete actions, or a normal distribution round a mean in [-1, 1] with
a deviation that is the same everywhere. A recorded action's likelihood counts by a weight: 1 for
behavioral cloning, more for better actions in what else is here.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dovetail.algorithm import Carry, Metrics, Timestep
from dovetail.algorithms.off_policy import Acted, Acting, Batch, OffPolicyAlgorithm
from dovetail.envs.interface import Continuous, Discrete
from dovetail.errors import check_option
from dovetail.functions.distributions import Categorical, Gaussian, output_size
from dovetail.functions.offline import advantage_weights
from dovetail.networks.critics import Critics, of_actions
from dovetail.networks.policy_network import PolicyNetwork

LOG_STD = (-5.0, 2.0)
"""Within which the logarithm of the policy's deviation is kept."""


@dataclass(frozen=True)
class Cloning(OffPolicyAlgorithm):
    """A policy for discrete or continuous actions, and the likelihood of recorded ones."""

    actions: ClassVar[tuple[type, ...]] = (Discrete, Continuous)
    needs_data: ClassVar[bool] = True

    learning_rate: float = 3e-4
    """Adam's step size."""

    @property
    def discrete(self) -> bool:
        """Whether actions are discrete."""
        return isinstance(self.task.env.action, Discrete)

    @property
    def actor(self) -> PolicyNetwork:
        """The policy's network: a logit for each action, or the mean of each entry."""
        env = self.task.env
        return PolicyNetwork(env.observation, output_size(env.action), self.hidden, self.activation)

    def new_policy(self, key: jax.Array) -> dict[str, Any]:
        """New parameters of the policy."""
        params = self.actor.init(key)
        if self.discrete:
            return params
        return params | {"log_std": jnp.zeros(output_size(self.task.env.action))}

    def policy(self, params: Any, observation: Any) -> Categorical | Gaussian:
        """The distribution of actions; a continuous one may leave [-1, 1] and is clipped."""
        outputs = self.actor.apply(params, observation)
        if self.discrete:
            return Categorical(outputs)
        return Gaussian(jnp.tanh(outputs), jnp.clip(params["log_std"], *LOG_STD))

    def act(
        self, params: Acting, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[jax.Array, Acted, Carry]:
        """An action of the policy; any action at first."""
        observation = self.normalized(params.moments, timestep.observation)
        policy = self.policy(params.network, observation)
        action = self.drawn(policy, key)
        return *self.acted(params, key, action, self.drawn_log_prob(policy, action)), carry

    def log_prob(
        self, params: Acting, carry: Carry, timestep: Timestep, action: jax.Array
    ) -> jax.Array:
        """By the policy; evenly at first."""
        observation = self.normalized(params.moments, timestep.observation)
        chance = self.drawn_log_prob(self.policy(params.network, observation), action)
        return self.acted_log_prob(params, chance)

    def greedy(self, params: Acting, carry: Carry, timestep: Timestep) -> tuple[jax.Array, Carry]:
        """The likeliest action."""
        observation = self.normalized(params.moments, timestep.observation)
        return self.policy(params.network, observation).mode(), carry

    def drawn(self, policy: Categorical | Gaussian, key: jax.Array) -> jax.Array:
        """An action of a distribution, within the bounds."""
        action = policy.sample(key)
        return action if self.discrete else jnp.clip(action, -1.0, 1.0)

    def drawn_log_prob(self, policy: Categorical | Gaussian, action: jax.Array) -> jax.Array:
        """With which log-probability `drawn` gives an action."""
        if isinstance(policy, Categorical):
            return policy.log_prob(action)
        return policy.clipped_log_prob(action)

    def unlikelihood(
        self, policy: Categorical | Gaussian, batch: Batch, weights: jax.Array | float = 1.0
    ) -> jax.Array:
        """Minus the mean log-likelihood of the recorded actions, each by its weight."""
        return -jnp.mean(batch.weights * weights * policy.log_prob(batch.action))


@dataclass(frozen=True)
class AdvantageWeighted(Cloning):
    """A policy fitted to the recorded actions by how much better than usual they were."""

    inverse_temperature: float = 1.0
    """How much the better actions are preferred: 0 makes all alike, as in behavioral cloning."""
    weight_limit: float = 100.0
    """The most that an action may count."""
    critics: int = 2
    """Networks that learn the value of actions; the lowest counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        inverse, limit = self.inverse_temperature, self.weight_limit
        check_option("inverse_temperature", inverse, inverse >= 0, "0 or more")
        check_option("weight_limit", limit, limit > 0, "more than 0")
        check_option("critics", self.critics, self.critics >= 1, "1 or more")

    @property
    def critic(self) -> Critics:
        """The critics' networks: of an action's entries, or with a value for each action."""
        env, layers = self.task.env, (self.hidden, self.activation)
        if isinstance(env.action, Continuous):
            return Critics(env.observation, env.action.size, 1, self.critics, *layers)
        return Critics(env.observation, 0, output_size(env.action), self.critics, *layers)

    def values(self, params: Any, observation: Any, action: jax.Array) -> jax.Array:
        """What the critics make of actions, [critics, n]."""
        if not self.discrete:
            return self.critic.apply(params, observation, action)[..., 0]
        return of_actions(self.critic.apply(params, observation), action)

    def critic_loss(
        self, params: Any, batch: Batch, goal: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        """Squared errors, summed over the critics."""
        values = self.values(params, batch.observation, batch.action)
        errors = values - goal
        loss = jnp.mean(batch.weights * jnp.sum(jnp.square(errors), axis=0))
        metrics = {"critic_loss": loss, "value": jnp.mean(values)}
        return loss, (jnp.mean(jnp.abs(errors), axis=0), metrics)

    def weighted(
        self, policy: Categorical | Gaussian, batch: Batch, advantages: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """The policy's loss: recorded actions count by their advantages [n]."""
        weights = advantage_weights(advantages, self.inverse_temperature, self.weight_limit)
        loss = self.unlikelihood(policy, batch, weights)
        return loss, {"actor_loss": loss, "mean_weight": jnp.mean(weights)}
