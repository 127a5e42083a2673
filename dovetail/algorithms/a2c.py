"""Advantage actor-critic, the synchronous form of https://arxiv.org/abs/1602.01783.

One gradient step on each short unroll: fast per step, but it needs more samples than PPO.
Unusual here: Adam in place of RMSProp, and generalized advantages; `gae_lambda` 1 gives the paper's
n-step returns.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dovetail.algorithm import RL, Algorithm, Metrics, Timestep, Trajectory
from dovetail.blocks.actor_critic import (
    ActorCarry,
    ActorCriticExtras,
    ActorCriticParams,
    Samples,
    advantages_and_targets,
    first_row,
)
from dovetail.blocks.normalizing import discounted_return, normalized, normalized_batch
from dovetail.blocks.optimizers import adam_with_clipping, annealed, apply_gradients, updates_in
from dovetail.blocks.options import check_network, check_options
from dovetail.functions.distributions import Distribution
from dovetail.functions.gradients import gradient
from dovetail.functions.losses import (
    entropy_loss,
    explained_variance,
    loss_weights,
    policy_gradient,
    standardize,
    value_loss,
)
from dovetail.functions.normalization import Moments, initial_moments
from dovetail.networks.actor_critic import ActorCritic
from dovetail.networks.encoder import Network


class A2CState(NamedTuple):
    """The learner's state."""

    params: Any
    optimizer: Any
    moments: Moments
    """Of the observations."""
    return_moments: Moments
    """Of the discounted returns."""
    key: jax.Array
    updates: jax.Array


@dataclass(frozen=True)
class A2C(Algorithm):
    """Advantage actor-critic: one policy-gradient step per short unroll."""

    unroll_length: int = 8
    """Steps each environment takes between two updates."""
    learning_rate: float = 1e-3
    """Adam's step size."""
    anneal_lr: bool = True
    """Whether the learning rate falls linearly to 0 over the run."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    gamma: float = 0.99
    """Discount factor γ."""
    gae_lambda: float = 0.95
    """GAE λ: less than 1 trades variance for bias; 1 gives the n-step returns of the paper."""
    normalize_advantages: bool = False
    """Whether each batch's advantages are standardized."""
    vf_coef: float = 0.5
    """Value coefficient: weight of the value loss."""
    ent_coef: float = 0.01
    """Entropy coefficient: weight of the entropy bonus."""
    normalize_observations: bool = False
    """Whether observations are shifted and scaled by their running moments."""
    normalize_rewards: bool = False
    """Whether rewards are scaled by the running deviation of discounted returns."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Sizes of the hidden layers."""
    activation: str = "tanh"
    """Activation of the hidden layers: elu, gelu, relu, silu or tanh."""
    network: Network = "auto"
    """Network before the hidden layers: auto, mlp, cnn, impala, file.py:Net or module:Net."""
    recurrent: int = 0
    """Size of the recurrent memory; 0 for none."""

    def __post_init__(self) -> None:
        check_options(
            self,
            positive=("unroll_length", "learning_rate", "max_grad_norm"),
            non_negative=("vf_coef", "ent_coef", "recurrent"),
            fraction=("gamma", "gae_lambda"),
        )
        check_network(self.hidden_sizes, self.activation)

    @property
    def actor_critic(self) -> ActorCritic:
        """Policy and value for the task's spaces."""
        env = self.task.env
        return ActorCritic(
            env.observation,
            env.action,
            self.hidden_sizes,
            self.activation,
            self.recurrent,
            network=self.network,
        )

    def optimizer(self) -> optax.GradientTransformation:
        """Adam on clipped gradients."""
        steps = updates_in(self.task, self.unroll_length)
        rate = annealed(self.learning_rate, steps) if self.anneal_lr else self.learning_rate
        return adam_with_clipping(rate, self.max_grad_norm)

    def init(self, key: jax.Array) -> A2CState:
        """New weights, a fresh optimizer, no steps seen."""
        network_key, key = jax.random.split(key)
        params = self.actor_critic.init(network_key)
        return A2CState(
            params=params,
            optimizer=self.optimizer().init(params),
            moments=initial_moments(self.task.env.observation),
            return_moments=initial_moments(jnp.zeros(())),
            key=key,
            updates=jnp.zeros((), jnp.int32),
        )

    def initial_carry(self) -> ActorCarry:
        """An empty memory, and a return of 0 where rewards are normalized."""
        returned = jnp.zeros(()) if self.normalize_rewards else ()
        return ActorCarry(self.actor_critic.initial_carry(), returned)

    def acting(self, state: A2CState) -> ActorCriticParams:
        """Weights and moments."""
        return ActorCriticParams(state.params, state.moments)

    def policy_and_value(
        self, params: ActorCriticParams, carry: ActorCarry, timestep: Timestep
    ) -> tuple[Distribution, jax.Array, Any]:
        """π(·|s), V(s) and the network's next memory, for one environment."""
        observation = normalized(timestep.observation, params.moments, self.normalize_observations)
        return self.actor_critic.step(params.network, carry.memory, observation)

    def act(
        self, params: ActorCriticParams, carry: ActorCarry, timestep: Timestep, key: jax.Array
    ) -> tuple[Any, ActorCriticExtras, ActorCarry]:
        """Samples from the policy."""
        distribution, value, memory = self.policy_and_value(params, carry, timestep)
        action = distribution.sample(key)
        returned = discounted_return(carry.discounted_return, timestep.reward, self.gamma)
        extras = ActorCriticExtras(distribution.log_prob(action), value, returned)
        return action, extras, ActorCarry(memory, returned)

    def greedy(
        self, params: ActorCriticParams, carry: ActorCarry, timestep: Timestep
    ) -> tuple[Any, ActorCarry]:
        """The policy's mode."""
        distribution, _, memory = self.policy_and_value(params, carry, timestep)
        return distribution.mode(), carry._replace(memory=memory)

    def log_prob(
        self, params: ActorCriticParams, carry: ActorCarry, timestep: Timestep, action: Any
    ) -> jax.Array:
        """log π(action|s)."""
        return self.policy_and_value(params, carry, timestep)[0].log_prob(action)

    def value(self, params: ActorCriticParams, carry: ActorCarry, timestep: Timestep) -> jax.Array:
        """V(s), the bootstrap where an unroll or an episode is cut."""
        return self.policy_and_value(params, carry, timestep)[1]

    def loss(self, params: Any, samples: Samples) -> tuple[jax.Array, Metrics]:
        """Policy gradient, value loss and entropy bonus of unrolls [T, B]."""
        weights, memory = samples.weights, first_row(samples.memory)
        distribution, values = self.actor_critic.unroll(
            params, memory, samples.observation, samples.first
        )
        log_probs = distribution.log_prob(samples.action)
        policy = policy_gradient(log_probs, samples.advantage, weights)
        value = value_loss(values, samples.target, weights)
        entropy = -entropy_loss(distribution.entropy(), weights)
        loss = policy + self.vf_coef * value - self.ent_coef * entropy
        return loss, {"loss": loss, "policy_loss": policy, "value_loss": value, "entropy": entropy}

    def learn(self, rl: RL, state: A2CState, batch: Trajectory) -> tuple[A2CState, Metrics]:
        """One gradient step on the whole batch."""
        prepared = normalized_batch(
            rl,
            batch,
            state.moments,
            state.return_moments,
            self.gamma,
            observations=self.normalize_observations,
            rewards=self.normalize_rewards,
        )
        weights = loss_weights(batch.valid, rl.mean)
        advantages, targets = advantages_and_targets(
            batch, prepared.reward, self.gamma, self.gae_lambda
        )
        if self.normalize_advantages:
            advantages = standardize(advantages, weights, rl.mean)
        samples = Samples(
            observation=prepared.observation,
            action=batch.action,
            log_prob=(),
            value=(),
            advantage=advantages,
            target=targets,
            weights=weights,
            first=batch.first,
            memory=batch.carry.memory,
        )
        gradients, metrics = gradient(self.loss, state.params, samples, axis=1)
        metrics["explained_variance"] = explained_variance(batch.extras.value, targets, weights)
        params, optimizer = apply_gradients(
            self.optimizer(), rl.mean(gradients), state.optimizer, state.params
        )
        return state._replace(
            params=params,
            optimizer=optimizer,
            moments=prepared.moments,
            return_moments=prepared.return_moments,
            updates=state.updates + 1,
        ), metrics

    def iteration(self, rl: RL, state: A2CState) -> tuple[A2CState, Metrics]:
        """Actors unroll the broadcast policy; the learner learns from all their steps."""
        params = rl.broadcast(self.acting(state))
        trajectory = rl.unroll(self.act, params, self.unroll_length, bootstrap=self.value)
        batch = rl.gather(trajectory)
        return self.learn(rl, state, batch)
