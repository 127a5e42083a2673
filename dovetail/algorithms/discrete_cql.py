"""Conservative Q-learning for discrete actions, https://arxiv.org/abs/2006.04779.

Double Q-learning (https://arxiv.org/abs/1509.06461) whose network is also pressed: down where the
soft maximum of all actions' values is, up where the recorded action's value is. The policy is the
action of the highest value.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dovetail.algorithm import RL, Carry, Metrics, Timestep
from dovetail.algorithms.off_policy import Acted, Acting, Batch, LearnerState, OffPolicyAlgorithm
from dovetail.envs.interface import Discrete
from dovetail.errors import check_option
from dovetail.functions.exploration import epsilon_greedy, epsilon_greedy_log_prob
from dovetail.functions.offline import conservative_gap
from dovetail.networks.critics import Critics, of_actions


@dataclass(frozen=True)
class DiscreteCQL(OffPolicyAlgorithm):
    """Conservative Q-learning: double Q-learning that distrusts what was not recorded."""

    actions: ClassVar[tuple[type, ...]] = (Discrete,)
    needs_data: ClassVar[bool] = True

    learning_rate: float = 3e-4
    """Adam's step size."""
    conservatism: float = 1.0
    """What the gap between all actions' values and the recorded one's costs the network."""
    epsilon: float = 0.05
    """The share of random actions in the environment, while training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("conservatism", self.conservatism, self.conservatism >= 0, "0 or more")
        check_option("epsilon", self.epsilon, 0 <= self.epsilon <= 1, "0 to 1")

    @property
    def critic(self) -> Critics:
        """The network: a value for each action."""
        env = self.task.env
        assert isinstance(env.action, Discrete)
        return Critics(env.observation, 0, env.action.n, 1, self.hidden, self.activation)

    def networks(self, key: jax.Array) -> dict[str, Any]:
        """New parameters of the network."""
        return {"critics": self.critic.init(key)}

    def acting(self, state: LearnerState) -> Acting:
        """The network's weights: there is no policy beside them."""
        return super().acting(state._replace(params={"actor": state.params["critics"]}))

    def values(self, params: Any, observation: Any) -> jax.Array:
        """What all actions are worth, [n, actions]."""
        return self.critic.apply(params, observation)[0]

    def act(
        self, params: Acting, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[jax.Array, Acted, Carry]:
        """The action of the highest value, sometimes any; any action at first."""
        values, epsilon = self._now(params, timestep), self._epsilon(params)
        action = epsilon_greedy(key, values, epsilon)
        return action, Acted(epsilon_greedy_log_prob(values, epsilon, action)), carry

    def log_prob(
        self, params: Acting, carry: Carry, timestep: Timestep, action: jax.Array
    ) -> jax.Array:
        """By the share of random actions."""
        values, epsilon = self._now(params, timestep), self._epsilon(params)
        return epsilon_greedy_log_prob(values, epsilon, action)

    def greedy(self, params: Acting, carry: Carry, timestep: Timestep) -> tuple[jax.Array, Carry]:
        """The action of the highest value."""
        return jnp.argmax(self._now(params, timestep)).astype(jnp.int32), carry

    def _epsilon(self, params: Acting) -> jax.Array:
        return jnp.where(params.warming, 1.0, self.epsilon)

    def _now(self, params: Acting, timestep: Timestep) -> jax.Array:
        observation = self.normalized(params.moments, timestep.observation)
        return self.values(params.network, jax.tree.map(lambda x: x[None], observation))[0]

    def goal(self, state: LearnerState, batch: Batch) -> jax.Array:
        """What the network should say [n]: rewards, and what the target network makes of the
        action that the network prefers."""
        best = self.values(state.params["critics"], batch.following).argmax(axis=-1)
        following = self.critic.apply(state.target["critics"], batch.following)
        return batch.reward + batch.discount * of_actions(following, best)[0]

    def critic_loss(
        self, params: Any, batch: Batch, goal: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        """Squared errors, and how far other actions' values stick out."""
        values = self.values(params, batch.observation)
        taken = of_actions(values[None], batch.action)[0]
        errors = taken - goal
        gap = conservative_gap(values, taken)
        loss = jnp.mean(batch.weights * (jnp.square(errors) + self.conservatism * gap))
        metrics = {
            "critic_loss": loss,
            "value": jnp.mean(taken),
            "conservative_gap": jnp.mean(gap),
        }
        return loss, (jnp.abs(errors), metrics)

    def gradient_step(
        self, rl: RL, state: LearnerState, batch: Batch, keys: jax.Array
    ) -> tuple[LearnerState, jax.Array, Metrics]:
        """The network one step along its gradient; then the target network follows."""
        goal = self.goal(state, batch)
        critics, (errors, metrics) = jax.grad(self.critic_loss, has_aux=True)(
            state.params["critics"], batch, goal
        )
        return self.follow(self.descend(rl, state, {"critics": critics})), errors, metrics
