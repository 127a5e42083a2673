"""IMPALA, https://arxiv.org/abs/1802.01561: actors that run ahead, corrected by V-trace.

Actors act on weights that are some versions old. The learner weights their steps by importance
ratios, cut off at 1 so that the variance stays small, and evaluates every step, and the observation
after the unroll, with its own weights. On trajectories of its own policy it is A2C.
Unusual here: Adam, where the paper has RMSProp, because it learns better on small tasks.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dovetail.algorithm import RL, Algorithm, Correction, Metrics, Timestep, Trajectory
from dovetail.blocks.actor_critic import ActorCarry, ActorCriticExtras, ActorCriticParams
from dovetail.blocks.normalizing import discounted_return, normalized, normalized_batch
from dovetail.blocks.optimizers import adam_with_clipping, annealed, apply_gradients, updates_in
from dovetail.blocks.options import check_network, check_options
from dovetail.blocks.vtrace import evaluate_unroll, vtrace_of
from dovetail.functions.distributions import Distribution
from dovetail.functions.gradients import gradient
from dovetail.functions.losses import (
    entropy_loss,
    explained_variance,
    loss_weights,
    policy_gradient,
    value_loss,
    weighted_mean,
)
from dovetail.functions.normalization import Moments, initial_moments
from dovetail.functions.returns import Clips
from dovetail.networks.actor_critic import ActorCritic
from dovetail.networks.encoder import Network


class IMPALAState(NamedTuple):
    """The learner's state."""

    params: Any
    optimizer: Any
    moments: Moments
    """Of the observations."""
    return_moments: Moments
    """Of the discounted returns."""
    key: jax.Array
    updates: jax.Array


class WeightedBatch(NamedTuple):
    """What a gradient step learns from: leaves [T, B, …]."""

    batch: Trajectory
    reward: jax.Array
    """Normalized, if rewards are."""
    weights: jax.Array
    """Of each step in the loss; 0 where it is not valid."""


@dataclass(frozen=True)
class IMPALA(Algorithm):
    """Importance-weighted actor-learner: one policy-gradient step per unroll, however old."""

    correction: ClassVar[Correction] = Correction("V-trace", None)

    unroll_length: int = 32
    """Steps each environment takes between two updates."""
    learning_rate: float = 1e-3
    """Adam's step size."""
    anneal_lr: bool = True
    """Whether the learning rate falls linearly to 0 over the run."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    gamma: float = 0.99
    """Discount factor γ."""
    vtrace_lambda: float = 1.0
    """V-trace λ: less than 1 trades variance for bias in targets and advantages; 1 in the paper."""
    rho_clip: float = 1.0
    """Where ratios are cut off in a step's own error: decides which policy's value is learned."""
    c_clip: float = 1.0
    """Where ratios are cut off in what a step passes back."""
    gradient_clip: float = 1.0
    """Where ratios are cut off in the policy's gradient."""
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
            positive=(
                "unroll_length",
                "learning_rate",
                "max_grad_norm",
                "rho_clip",
                "c_clip",
                "gradient_clip",
            ),
            non_negative=("vf_coef", "ent_coef", "recurrent"),
            fraction=("gamma", "vtrace_lambda"),
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

    def init(self, key: jax.Array) -> IMPALAState:
        """New weights, a fresh optimizer, no steps seen."""
        network_key, key = jax.random.split(key)
        params = self.actor_critic.init(network_key)
        return IMPALAState(
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

    def acting(self, state: IMPALAState) -> ActorCriticParams:
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

    def loss(
        self, params: Any, samples: WeightedBatch, moments: Moments
    ) -> tuple[jax.Array, Metrics]:
        """V-trace's policy gradient and value loss, and the entropy bonus.

        One pass of the network gives the estimates and the terms that learn from them. Observations
        are normalized by the learner's present moments, as its policy would see them.
        """
        batch, reward, weights = samples
        distribution, values = evaluate_unroll(
            self.actor_critic, params, moments, batch, self.normalize_observations
        )
        log_probs = distribution.log_prob(batch.action)
        clips = Clips(self.rho_clip, self.c_clip, self.gradient_clip)
        trace = vtrace_of(batch, reward, log_probs, values, self.gamma, self.vtrace_lambda, clips)
        policy = policy_gradient(log_probs, trace.weights * trace.advantages, weights)
        value = value_loss(values[:-1], trace.targets, weights)
        entropy = -entropy_loss(distribution.entropy(), weights)
        loss = policy + self.vf_coef * value - self.ent_coef * entropy
        return loss, {
            "loss": loss,
            "policy_loss": policy,
            "value_loss": value,
            "entropy": entropy,
            "explained_variance": explained_variance(values[:-1], trace.targets, weights),
            "mean_ratio": weighted_mean(trace.weights, weights),
        }

    def learn(self, rl: RL, state: IMPALAState, batch: Trajectory) -> tuple[IMPALAState, Metrics]:
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
        # No loss reads the next observations: dropping them keeps them out of the pieces' loop.
        samples = WeightedBatch(batch._replace(next_observation=()), prepared.reward, weights)
        gradients, metrics = gradient(self.loss, state.params, samples, state.moments, axis=1)
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

    def iteration(self, rl: RL, state: IMPALAState) -> tuple[IMPALAState, Metrics]:
        """Actors unroll the broadcast policy; the learner learns from all their steps."""
        params = rl.broadcast(self.acting(state))
        trajectory = rl.unroll(self.act, params, self.unroll_length, bootstrap=self.value)
        batch = rl.gather(trajectory)
        return self.learn(rl, state, batch)
