"""What the policy-gradient algorithms share: one network for policy and value, and how it acts.

Observations are normalized by moments that travel with the weights, so acting and learning always
agree. For reward normalization each environment's carry holds its discounted return so far; the
learner reads it from the trajectory, so it is the same however environments are split.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dovetail.algorithm import RL, Algorithm, Carry, Metrics, Timestep, Trajectory
from dovetail.errors import check_option
from dovetail.functions.distributions import Distribution
from dovetail.functions.gradients import gradient
from dovetail.functions.losses import (
    entropy_loss,
    explained_variance,
    loss_weights,
    policy_gradient,
    value_loss,
)
from dovetail.functions.normalization import (
    Moments,
    batch_sums,
    initial_moments,
    normalize,
    scale,
    update,
)
from dovetail.functions.returns import generalized_advantages, successor_values
from dovetail.networks import layers
from dovetail.networks.actor_critic import ActorCritic


class Acting(NamedTuple):
    """What actors need: the network's weights and the observations' moments."""

    network: Any
    moments: Moments


class ActorCarry(NamedTuple):
    """One environment's carry: the network's memory, and the episode's discounted return so far."""

    memory: Any
    discounted_return: Any
    """A scalar, or empty unless rewards are normalized."""


class Acted(NamedTuple):
    """What acting leaves in the trajectory beside the action."""

    log_prob: jax.Array
    value: jax.Array
    discounted_return: Any
    """Of the rewards before this step; empty unless rewards are normalized."""


class LearnerState(NamedTuple):
    """The learner's state."""

    params: Any
    optimizer: Any
    moments: Moments
    return_moments: Moments
    key: jax.Array
    updates: jax.Array


class Prepared(NamedTuple):
    """A batch ready to learn from, [T, B, …], and the moments that now include it."""

    observation: Any
    reward: jax.Array
    weights: jax.Array
    moments: Moments
    return_moments: Moments


@dataclass(frozen=True)
class ActorCriticAlgorithm(Algorithm):
    """Options and acting of an algorithm that learns a policy and a value."""

    unroll_length: int = 128
    """Steps each environment takes between two updates."""
    learning_rate: float = 1e-3
    """Adam's step size."""
    anneal: bool = True
    """Whether the learning rate falls linearly to 0 over the run."""
    discount: float = 0.99
    """How much a reward one step later counts."""
    value_coefficient: float = 0.5
    """Weight of the value loss."""
    entropy_coefficient: float = 0.01
    """Weight of the entropy bonus."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    normalize_observations: bool = False
    """Whether observations are shifted and scaled by their running moments."""
    normalize_rewards: bool = False
    """Whether rewards are scaled by the running deviation of discounted returns."""
    hidden: tuple[int, ...] = (64, 64)
    """Sizes of the hidden layers."""
    activation: str = "tanh"
    """Activation of the hidden layers: elu, gelu, relu, silu or tanh."""
    recurrent: int = 0
    """Size of the recurrent memory; 0 for none."""

    def __post_init__(self) -> None:
        positive = ("unroll_length", "learning_rate", "max_grad_norm")
        for name in positive:
            check_option(name, getattr(self, name), getattr(self, name) > 0, "more than 0")
        for name in ("value_coefficient", "entropy_coefficient", "recurrent"):
            check_option(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        check_option("discount", self.discount, 0 <= self.discount <= 1, "0 to 1")
        check_option("hidden", self.hidden, all(n > 0 for n in self.hidden), "sizes above 0")
        layers.activation(self.activation)

    @property
    def network(self) -> ActorCritic:
        """The network for the task's spaces."""
        env = self.task.env
        return ActorCritic(
            env.observation, env.action, self.hidden, self.activation, self.recurrent
        )

    def init(self, key: jax.Array) -> LearnerState:
        """New weights, a fresh optimizer, nothing seen."""
        network_key, key = jax.random.split(key)
        params = self.network.init(network_key)
        return LearnerState(
            params=params,
            optimizer=self.optimizer().init(params),
            moments=initial_moments(self.task.env.observation),
            return_moments=initial_moments(jnp.zeros(())),
            key=key,
            updates=jnp.zeros((), jnp.int32),
        )

    def optimizer(self) -> optax.GradientTransformation:
        """Adam with clipped gradients; annealed over all the updates of the task."""
        steps = -(-self.task.steps // (self.unroll_length * self.task.num_envs))
        rate: optax.ScalarOrSchedule = self.learning_rate
        if self.anneal:
            rate = optax.linear_schedule(rate, 0.0, max(1, steps * self.gradient_steps()))
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm), optax.adam(rate, eps=1e-5)
        )

    def gradient_steps(self) -> int:
        """Optimizer steps per update."""
        return 1

    def initial_carry(self) -> Carry:
        """An empty memory and nothing returned yet."""
        nothing = jnp.zeros(()) if self.normalize_rewards else ()
        return ActorCarry(self.network.initial_carry(), nothing)

    def acting(self, state: LearnerState) -> Acting:
        """Weights and moments."""
        return Acting(state.params, state.moments)

    def act(
        self, params: Acting, carry: ActorCarry, timestep: Timestep, key: jax.Array
    ) -> tuple[jax.Array, Acted, ActorCarry]:
        """Samples from the policy."""
        distribution, value, memory = self._network_step(params, carry, timestep)
        action = distribution.sample(key)
        discounted_return = jax.tree.map(
            lambda so_far: self.discount * so_far + timestep.reward, carry.discounted_return
        )
        extras = Acted(distribution.log_prob(action), value, discounted_return)
        return action, extras, ActorCarry(memory, discounted_return)

    def greedy(
        self, params: Acting, carry: ActorCarry, timestep: Timestep
    ) -> tuple[jax.Array, ActorCarry]:
        """The policy's likeliest action."""
        distribution, _, memory = self._network_step(params, carry, timestep)
        return distribution.mode(), carry._replace(memory=memory)

    def log_prob(
        self, params: Acting, carry: ActorCarry, timestep: Timestep, action: jax.Array
    ) -> jax.Array:
        """By the policy."""
        return self._network_step(params, carry, timestep)[0].log_prob(action)

    def value(self, params: Acting, carry: ActorCarry, timestep: Timestep) -> jax.Array:
        """The value of what `timestep` shows: where a cut episode would have gone on."""
        return self._network_step(params, carry, timestep)[1]

    def _network_step(self, params: Acting, carry: ActorCarry, timestep: Timestep) -> Any:
        observation = self._normalized(params.moments, timestep.observation)
        return self.network.step(params.network, carry.memory, observation)

    def _normalized(self, moments: Moments, observation: Any) -> Any:
        return normalize(moments, observation) if self.normalize_observations else observation

    def iteration(self, rl: RL, state: LearnerState) -> tuple[LearnerState, Metrics]:
        """Actors unroll the broadcast policy; the learner learns from what they gathered."""
        params = rl.broadcast(self.acting(state))
        trajectory = rl.unroll(self.act, params, self.unroll_length, bootstrap=self.value)
        batch = rl.gather(trajectory)
        return self.learn(rl, state, batch)

    def learn(self, rl: RL, state: LearnerState, batch: Trajectory) -> tuple[LearnerState, Metrics]:
        """One update from a batch; each algorithm has its own."""
        raise NotImplementedError(f"{type(self).__name__} does not define learn(rl, state, batch).")

    def prepare(self, rl: RL, state: LearnerState, batch: Trajectory) -> Prepared:
        """Normalizes what is to be: observations by the moments that the present weights go with,
        rewards by those that include the batch."""
        moments, return_moments, reward = state.moments, state.return_moments, batch.reward
        valid = batch.valid.astype(jnp.float32)
        if self.normalize_rewards:
            returns = self.discount * batch.extras.discounted_return + reward
            return_moments = update(
                return_moments, rl.mean(batch_sums(return_moments, returns, valid))
            )
            reward = scale(return_moments, reward)
        if self.normalize_observations:
            moments = update(moments, rl.mean(batch_sums(moments, batch.observation, valid)))
        return Prepared(
            observation=self._normalized(state.moments, batch.observation),
            reward=reward,
            weights=loss_weights(batch.valid, rl.mean),
            moments=moments,
            return_moments=return_moments,
        )

    def advantages_and_targets(
        self, batch: Trajectory, reward: jax.Array, lambda_: float
    ) -> tuple[jax.Array, jax.Array]:
        """Generalized advantages, and the returns that they make of the values met in acting."""
        values, ends = batch.extras.value, (batch.terminated, batch.truncated)
        next_values = successor_values(values, batch.bootstrap, *ends)
        advantages = generalized_advantages(
            reward, values, next_values, *ends, self.discount, lambda_
        )
        return advantages, advantages + values

    def revisit(
        self, params: Any, moments: Moments, batch: Trajectory
    ) -> tuple[Distribution, jax.Array]:
        """What the network makes of an unroll now, and of what follows it.

        A distribution [T, B], and values [T + 1, B].
        """
        observation, first = jax.tree.map(
            lambda rows, last: jnp.concatenate([rows, last]),
            (batch.observation, batch.first),
            (batch.last.observation, batch.last.first),
        )
        distribution, values = self.network.unroll(
            params, first_memory(batch), self._normalized(moments, observation), first
        )
        return jax.tree.map(lambda x: x[:-1], distribution), values

    def policy_gradient_loss(
        self,
        outputs: tuple[Distribution, jax.Array],
        action: Any,
        advantages: jax.Array,
        targets: jax.Array,
        weights: jax.Array,
    ) -> tuple[jax.Array, Metrics]:
        """Policy gradient, value loss and entropy bonus of (distribution, values), all [T, B]."""
        distribution, values = outputs
        policy = policy_gradient(distribution.log_prob(action), advantages, weights)
        value = value_loss(values, targets, weights)
        entropy = -entropy_loss(distribution.entropy(), weights)
        total = policy + self.value_coefficient * value - self.entropy_coefficient * entropy
        return total, {
            "loss": total,
            "policy_loss": policy,
            "value_loss": value,
            "entropy": entropy,
        }

    def policy_gradient_step(
        self,
        rl: RL,
        state: LearnerState,
        batch: Trajectory,
        prepared: Prepared,
        advantages: jax.Array,
        targets: jax.Array,
    ) -> tuple[LearnerState, Metrics]:
        """One gradient step on the whole batch; the memory is replayed under the new weights."""
        weights = prepared.weights

        def loss(params: Any, samples: Any) -> tuple[jax.Array, Metrics]:
            memory, observation, first, *learned = samples
            memory = jax.tree.map(lambda x: x[0], memory)
            outputs = self.network.unroll(params, memory, observation, first)
            return self.policy_gradient_loss(outputs, *learned)

        samples = (batch.carry.memory, prepared.observation, batch.first, batch.action)
        samples += advantages, targets, weights
        gradients, metrics = gradient(loss, state.params, samples, axis=1)
        metrics["explained_variance"] = explained_variance(batch.extras.value, targets, weights)
        params, optimizer = self.descend(state, rl.mean(gradients))
        return self.next_state(state, prepared, params, optimizer), metrics

    def descend(self, state: LearnerState, gradients: Any) -> tuple[Any, Any]:
        """(parameters, optimizer) after one step along the gradients."""
        updates, optimizer = self.optimizer().update(gradients, state.optimizer, state.params)
        return optax.apply_updates(state.params, updates), optimizer

    def next_state(
        self, state: LearnerState, prepared: Prepared, params: Any, optimizer: Any
    ) -> LearnerState:
        """The state after an update."""
        return state._replace(
            params=params,
            optimizer=optimizer,
            moments=prepared.moments,
            return_moments=prepared.return_moments,
            updates=state.updates + 1,
        )


def first_memory(batch: Trajectory) -> Any:
    """The network's memory [B, …] with which an unroll began."""
    return jax.tree.map(lambda x: x[0], batch.carry.memory)
