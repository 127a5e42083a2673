"""Soft actor-critic with a learned temperature, https://arxiv.org/abs/1812.05905.

The policy maximizes value and entropy; the temperature between the two is learned so that the
entropy stays at a given level. With more critics and more gradient steps it is REDQ
(https://arxiv.org/abs/2101.05982), with layer normalization and dropout DroQ
(https://arxiv.org/abs/2110.02034). Unusual here: the gradients of policy, critics and temperature
are taken at the same weights, so that they can be computed side by side.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dovetail.algorithm import RL, Carry, Metrics, Timestep
from dovetail.algorithms.off_policy import Acted, Acting, Batch, LearnerState, OffPolicyAlgorithm
from dovetail.envs.interface import Continuous
from dovetail.errors import check_option
from dovetail.functions.distributions import SquashedGaussian
from dovetail.keys import for_all
from dovetail.networks.critics import Critics
from dovetail.networks.policy_network import PolicyNetwork

LOG_STD = (-20.0, 2.0)
"""Within which the logarithm of the policy's deviation is kept."""


@dataclass(frozen=True)
class SAC(OffPolicyAlgorithm):
    """Soft actor-critic: a random policy that is paid for its entropy."""

    actions: ClassVar[tuple[type, ...]] = (Continuous,)

    critics: int = 2
    """Networks that learn the value of actions."""
    subset: int = 2
    """Critics, drawn anew for each gradient step, of which the lowest value is the target."""
    mean_critic: bool = False
    """Whether the policy follows the critics' mean, as in REDQ and DroQ, or their minimum."""
    actor_every: int = 1
    """Gradient steps of the critics for each of the policy."""
    layer_norm: bool = False
    """Whether the critics' hidden layers are normalized, as in DroQ."""
    dropout: float = 0.0
    """The share of the critics' hidden units that is left out, as in DroQ."""
    temperature: float = 1.0
    """What entropy is worth, at first or always."""
    learn_temperature: bool = True
    """Whether that is learned."""
    entropy_per_action: float = -1.0
    """The entropy at which the temperature is to keep the policy, for each entry of an action."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("critics", "actor_every"):
            check_option(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        count = self.critics
        check_option("subset", self.subset, 1 <= self.subset <= count, f"1 to {count}")
        check_option("dropout", self.dropout, 0 <= self.dropout < 1, "0 or more, less than 1")
        check_option("temperature", self.temperature, self.temperature > 0, "more than 0")

    @property
    def rhythm(self) -> int:
        """Gradient steps of the critics for each of the policy."""
        return self.actor_every

    @property
    def actor(self) -> PolicyNetwork:
        """The policy's network: mean and deviation of each entry."""
        env = self.task.env
        assert isinstance(env.action, Continuous)
        return PolicyNetwork(env.observation, 2 * env.action.size, self.hidden, self.activation)

    @property
    def critic(self) -> Critics:
        """The critics' networks."""
        env = self.task.env
        assert isinstance(env.action, Continuous)
        return self._critics(env.action.size, 1)

    def _critics(self, action: int, outputs: int) -> Critics:
        env, hidden, activation = self.task.env, self.hidden, self.activation
        regular = self.layer_norm, self.dropout
        return Critics(env.observation, action, outputs, self.critics, hidden, activation, *regular)

    @property
    def target_entropy(self) -> float:
        """The entropy at which the temperature is to keep the policy."""
        assert isinstance(self.task.env.action, Continuous)
        return self.entropy_per_action * self.task.env.action.size

    def networks(self, key: jax.Array) -> dict[str, Any]:
        """New parameters of the policy, the critics and the temperature."""
        keys = jax.random.split(key)
        return {
            "actor": self.actor.init(keys[0]),
            "critics": self.critic.init(keys[1]),
            "log_temperature": jnp.asarray(math.log(self.temperature), jnp.float32),
        }

    def policy(self, params: Any, observation: Any) -> SquashedGaussian:
        """The distribution of actions."""
        mean, log_std = jnp.split(self.actor.apply(params, observation), 2, axis=-1)
        return SquashedGaussian(mean, jnp.clip(log_std, *LOG_STD))

    def act(
        self, params: Acting, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[jax.Array, Acted, Carry]:
        """An action of the policy; any action at first."""
        observation = self.normalized(params.moments, timestep.observation)
        action, log_prob = self.policy(params.network, observation).sample(key)
        return *self.acted(params, key, action, log_prob), carry

    def log_prob(
        self, params: Acting, carry: Carry, timestep: Timestep, action: jax.Array
    ) -> jax.Array:
        """By the policy; evenly at first."""
        observation = self.normalized(params.moments, timestep.observation)
        chance = self.policy(params.network, observation).log_prob(action)
        return self.acted_log_prob(params, chance)

    def greedy(self, params: Acting, carry: Carry, timestep: Timestep) -> tuple[jax.Array, Carry]:
        """The policy's mode."""
        observation = self.normalized(params.moments, timestep.observation)
        return self.policy(params.network, observation).mode(), carry

    def goal(self, state: LearnerState, batch: Batch, keys: jax.Array) -> jax.Array:
        """What the critics should say [n]: rewards, and the soft value that targets expect."""
        policy = self.policy(state.params["actor"], batch.following)
        action, log_prob = policy.sample(keys[0])
        targets = self.some(state.target["critics"], keys[1])
        values = self.critic.apply(targets, batch.following, action, keys[2])[..., 0].min(axis=0)
        soft = values - jnp.exp(state.params["log_temperature"]) * log_prob
        return batch.reward + batch.discount * soft

    def some(self, critics: Any, key: jax.Array) -> Any:
        """As many of the critics as make a target."""
        if self.subset == self.critics:
            return critics
        chosen = jax.random.permutation(for_all(key), self.critics)[: self.subset]
        return jax.tree.map(lambda x: x[chosen], critics)

    def critic_loss(
        self, params: Any, batch: Batch, goal: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        """Squared errors, summed over the critics."""
        values = self.critic.apply(params, batch.observation, batch.action, key)[..., 0]
        errors = values - goal
        loss = jnp.mean(batch.weights * jnp.sum(jnp.square(errors), axis=0))
        metrics = {"critic_loss": loss, "value": jnp.mean(values)}
        return loss, (jnp.mean(jnp.abs(errors), axis=0), metrics)

    def actor_loss(
        self, params: Any, state: LearnerState, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """What entropy lacks of its worth, and value."""
        action, log_prob = self.policy(params, batch.observation).sample(key)
        values = self.critic.apply(state.params["critics"], batch.observation, action, key)[..., 0]
        value = values.mean(axis=0) if self.mean_critic else values.min(axis=0)
        temperature = jnp.exp(state.params["log_temperature"])
        loss = jnp.mean(temperature * log_prob - value)
        entropy = -jnp.mean(log_prob)
        return loss, {"actor_loss": loss, "entropy": entropy, "temperature": temperature}

    def gradient_step(
        self, rl: RL, state: LearnerState, batch: Batch, keys: jax.Array
    ) -> tuple[LearnerState, jax.Array, Metrics]:
        """Critics, and every so often policy and temperature, one step along their gradients; then
        the target networks follow."""
        goal = self.goal(state, batch, keys)
        critics, (errors, found) = jax.grad(self.critic_loss, has_aux=True)(
            state.params["critics"], batch, goal, keys[3]
        )

        def improve(after: LearnerState) -> tuple[LearnerState, Metrics]:
            actor, metrics = jax.grad(self.actor_loss, has_aux=True)(
                state.params["actor"], state, batch, keys[4]
            )
            gradients = {"actor": actor}
            if self.learn_temperature:  # of the loss log α (entropy - target)
                gradients["log_temperature"] = metrics["entropy"] - self.target_entropy
            return self.descend(rl, after, gradients), metrics

        after = self.descend(rl, state, {"critics": critics})
        after, metrics = self.at_times(improve, after)
        return self.follow(after), errors, found | metrics
