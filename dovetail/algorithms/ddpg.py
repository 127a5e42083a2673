"""Deep deterministic policy gradient, https://arxiv.org/abs/1509.02971.

The policy names one action; a critic learns what actions are worth, and the policy climbs the
critic's slope at its own action. Unusual here: exploration is normal noise, uncorrelated over time,
which later work found to do as well, and all gradients of a step are taken at the same weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dovetail.algorithm import RL, Carry, Metrics, Timestep
from dovetail.algorithms.off_policy import Acting, Batch, LearnerState, OffPolicyAlgorithm
from dovetail.envs.interface import Continuous
from dovetail.errors import check_option
from dovetail.functions.exploration import add_noise
from dovetail.networks.critics import Critics
from dovetail.networks.policy_network import PolicyNetwork

Mean = Callable[[jax.Array], jax.Array]


def alone(x: jax.Array) -> jax.Array:
    """The average over one learner."""
    return x


@dataclass(frozen=True)
class DDPG(OffPolicyAlgorithm):
    """Deep deterministic policy gradient: a policy that climbs the slope of a learned value."""

    actions: ClassVar[tuple[type, ...]] = (Continuous,)
    followed: ClassVar[tuple[str, ...]] = ("actor", "critics")
    critics: ClassVar[int] = 1

    exploration_noise: float = 0.1
    """The deviation of the noise that is added to actions in [-1, 1] while training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        noise = self.exploration_noise
        check_option("exploration_noise", noise, noise >= 0, "0 or more")

    @property
    def actor(self) -> PolicyNetwork:
        """The policy's network."""
        env = self.task.env
        assert isinstance(env.action, Continuous)
        return PolicyNetwork(env.observation, env.action.size, self.hidden, self.activation)

    @property
    def critic(self) -> Critics:
        """The critics' networks."""
        env = self.task.env
        assert isinstance(env.action, Continuous)
        size, hidden = env.action.size, self.hidden
        return Critics(env.observation, size, 1, self.critics, hidden, self.activation)

    def networks(self, key: jax.Array) -> dict[str, Any]:
        """New parameters of the policy and the critics."""
        keys = jax.random.split(key)
        return {"actor": self.actor.init(keys[0]), "critics": self.critic.init(keys[1])}

    def policy(self, params: Any, observation: Any) -> jax.Array:
        """The action in [-1, 1]."""
        return jnp.tanh(self.actor.apply(params, observation))

    def act(
        self, params: Acting, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[jax.Array, tuple[()], Carry]:
        """The policy's action with noise; any action at first."""
        observation = self.normalized(params.moments, timestep.observation)
        action = add_noise(key, self.policy(params.network, observation), self.exploration_noise)
        return jnp.where(params.warming, self.random_action(key), action), (), carry

    def greedy(self, params: Acting, carry: Carry, timestep: Timestep) -> tuple[jax.Array, Carry]:
        """The policy's action."""
        observation = self.normalized(params.moments, timestep.observation)
        return self.policy(params.network, observation), carry

    def values(self, params: Any, observation: Any, action: jax.Array) -> jax.Array:
        """What the critics make of actions, [critics, n]."""
        return self.critic.apply(params, observation, action)[..., 0]

    def goal(self, state: LearnerState, batch: Batch, keys: jax.Array) -> jax.Array:
        """What the critics should say [n]: the rewards, and what the target networks expect."""
        action = self.policy(state.target["actor"], batch.following)
        following = self.values(state.target["critics"], batch.following, action)
        return batch.reward + batch.discount * following.min(axis=0)

    def critic_loss(
        self, params: Any, batch: Batch, goal: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        """Squared errors, summed over the critics."""
        values = self.values(params, batch.observation, batch.action)
        errors = values - goal
        loss = jnp.mean(batch.weights * jnp.sum(jnp.square(errors), axis=0))
        metrics = {"critic_loss": loss, "value": jnp.mean(values)}
        return loss, (jnp.mean(jnp.abs(errors), axis=0), metrics)

    def actor_loss(
        self, params: Any, critics: Any, batch: Batch, mean: Mean = alone
    ) -> tuple[jax.Array, Metrics]:
        """Minus what the first critic makes of the policy's actions; `mean` averages over
        learner replicas what is one number of a batch."""
        action = self.policy(params, batch.observation)
        first = jax.tree.map(lambda x: x[:1], critics)
        loss = -jnp.mean(self.values(first, batch.observation, action))
        return loss, {"actor_loss": loss}

    def gradient_step(
        self, rl: RL, state: LearnerState, batch: Batch, keys: jax.Array
    ) -> tuple[LearnerState, jax.Array, Metrics]:
        """Critics and policy one step along their gradients; then the target networks follow."""
        goal = self.goal(state, batch, keys)
        critics, (errors, found) = jax.grad(self.critic_loss, has_aux=True)(
            state.params["critics"], batch, goal
        )
        actor, metrics = jax.grad(self.actor_loss, has_aux=True)(
            state.params["actor"], state.params["critics"], batch, rl.mean
        )
        after = self.descend(rl, state, {"actor": actor, "critics": critics})
        return self.follow(after), errors, found | metrics
