"""APPO: PPO for actors that run ahead, https://arxiv.org/abs/1912.00167, https://arxiv.org/abs/2006.11751.

The clipped ratio is that of the learner to the policy that acted, so a batch may be some versions
old; advantages and targets are V-trace's, from the learner's own values. They are computed once per
batch, before its epochs. Unusual here: the advantages are not weighted by the importance ratio,
since the surrogate already is. On trajectories of its own policy it is PPO.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dovetail.algorithm import RL, Algorithm, Correction, Metrics, Timestep, Trajectory
from dovetail.blocks.actor_critic import (
    ActorCarry,
    ActorCriticExtras,
    ActorCriticParams,
    Samples,
    first_row,
)
from dovetail.blocks.minibatches import (
    MinibatchProgress,
    environment_groups,
    epochs_of_minibatches,
    stop_at_divergence,
    time_rows,
)
from dovetail.blocks.normalizing import discounted_return, normalized, normalized_batch
from dovetail.blocks.optimizers import adam_with_clipping, annealed, apply_gradients, updates_in
from dovetail.blocks.options import check_network, check_options
from dovetail.blocks.vtrace import evaluate_unroll, vtrace_of
from dovetail.functions.distributions import Distribution
from dovetail.functions.gradients import gradient
from dovetail.functions.losses import (
    approximate_kl,
    clip_fraction,
    clipped_surrogate,
    clipped_value_loss,
    entropy_loss,
    explained_variance,
    loss_weights,
    standardize,
    value_loss,
)
from dovetail.functions.normalization import Moments, initial_moments
from dovetail.functions.returns import Clips, VTrace
from dovetail.networks.actor_critic import ActorCritic
from dovetail.networks.encoder import Network


class APPOState(NamedTuple):
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
class APPO(Algorithm):
    """Asynchronous PPO: clipped policy gradients with V-trace's advantages."""

    correction: ClassVar[Correction] = Correction("V-trace", None)

    unroll_length: int = 64
    """Steps each environment takes between two updates."""
    epochs: int = 4
    """Passes over each batch."""
    num_minibatches: int = 4
    """Gradient steps per pass; divides the unroll length (the environments, if recurrent)."""
    learning_rate: float = 1e-3
    """Adam's step size."""
    anneal_lr: bool = True
    """Whether the learning rate falls linearly to 0 over the run."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    gamma: float = 0.99
    """Discount factor γ."""
    vtrace_lambda: float = 0.95
    """V-trace λ: less than 1 trades variance for bias in the advantages."""
    rho_clip: float = 1.0
    """Where ratios are cut off in a step's own error: decides which policy's value is learned."""
    c_clip: float = 1.0
    """Where ratios are cut off in what a step passes back."""
    normalize_advantages: bool = True
    """Whether each batch's advantages are standardized."""
    clip_range: float = 0.2
    """Clip range ε: how far the probability ratio may move in one update."""
    clip_value: bool = False
    """Whether the value's step is clipped too."""
    target_kl: float = 0.0
    """Stop an update's gradient steps once the divergence passes 1.5 times this; 0 for never."""
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
                "clip_range",
                "rho_clip",
                "c_clip",
            ),
            non_negative=("vf_coef", "ent_coef", "recurrent", "target_kl"),
            at_least_one=("epochs", "num_minibatches"),
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
        steps = updates_in(self.task, self.unroll_length) * self.epochs * self.num_minibatches
        rate = annealed(self.learning_rate, steps) if self.anneal_lr else self.learning_rate
        return adam_with_clipping(rate, self.max_grad_norm)

    def init(self, key: jax.Array) -> APPOState:
        """New weights, a fresh optimizer, no steps seen."""
        network_key, key = jax.random.split(key)
        params = self.actor_critic.init(network_key)
        return APPOState(
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

    def acting(self, state: APPOState) -> ActorCriticParams:
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
        """Clipped surrogate, value loss and entropy bonus of one minibatch."""
        weights = samples.weights
        if self.recurrent:
            memory = first_row(samples.memory)
            distribution, values = self.actor_critic.unroll(
                params, memory, samples.observation, samples.first
            )
        else:
            distribution, values, _ = self.actor_critic.step(params, (), samples.observation)
        log_probs = distribution.log_prob(samples.action)
        policy = clipped_surrogate(
            log_probs, samples.log_prob, samples.advantage, self.clip_range, weights
        )
        if self.clip_value:
            value = clipped_value_loss(
                values, samples.value, samples.target, self.clip_range, weights
            )
        else:
            value = value_loss(values, samples.target, weights)
        entropy = -entropy_loss(distribution.entropy(), weights)
        loss = policy + self.vf_coef * value - self.ent_coef * entropy
        return loss, {
            "loss": loss,
            "policy_loss": policy,
            "value_loss": value,
            "entropy": entropy,
            "approx_kl": approximate_kl(log_probs, samples.log_prob, weights),
            "clip_fraction": clip_fraction(log_probs, samples.log_prob, self.clip_range, weights),
        }

    def gradient_step(
        self, rl: RL, progress: MinibatchProgress, samples: Samples
    ) -> tuple[MinibatchProgress, Metrics]:
        """One gradient step on a minibatch, undone if the policy has moved too far."""
        if self.recurrent:
            gradients, metrics = jax.grad(self.loss, has_aux=True)(progress.params, samples)
        else:
            gradients, metrics = gradient(self.loss, progress.params, samples)
        params, optimizer = apply_gradients(
            self.optimizer(), rl.mean(gradients), progress.optimizer, progress.params
        )
        after = MinibatchProgress(params, optimizer, progress.going)
        if self.target_kl:
            kl = rl.mean(metrics["approx_kl"])
            after = stop_at_divergence(progress, after, kl, self.target_kl)
        return after, metrics

    def estimates(self, state: APPOState, batch: Trajectory, reward: jax.Array) -> VTrace:
        """Advantages and the value's targets [T, B] by V-trace under the learner's weights."""
        distribution, values = evaluate_unroll(
            self.actor_critic, state.params, state.moments, batch, self.normalize_observations
        )
        log_probs = distribution.log_prob(batch.action)
        clips = Clips(self.rho_clip, self.c_clip)
        return vtrace_of(batch, reward, log_probs, values, self.gamma, self.vtrace_lambda, clips)

    def learn(self, rl: RL, state: APPOState, batch: Trajectory) -> tuple[APPOState, Metrics]:
        """V-trace once, then epochs of minibatches."""
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
        trace = self.estimates(state, batch, prepared.reward)
        advantages, targets = trace.advantages, trace.targets
        if self.normalize_advantages:
            advantages = standardize(advantages, weights, rl.mean)
        samples = Samples(
            observation=prepared.observation,
            action=batch.action,
            log_prob=batch.extras.log_prob,
            value=batch.extras.value,
            advantage=advantages,
            target=targets,
            weights=weights,
            first=batch.first,
            memory=batch.carry.memory,
        )
        split = environment_groups if self.recurrent else time_rows
        after, metrics = epochs_of_minibatches(
            lambda progress, minibatch: self.gradient_step(rl, progress, minibatch),
            MinibatchProgress(state.params, state.optimizer, jnp.array(True)),
            split(samples, self.num_minibatches, type(self).__name__),
            self.epochs,
            jax.random.fold_in(state.key, state.updates),
        )
        metrics["explained_variance"] = explained_variance(samples.value, targets, weights)
        return state._replace(
            params=after.params,
            optimizer=after.optimizer,
            moments=prepared.moments,
            return_moments=prepared.return_moments,
            updates=state.updates + 1,
        ), metrics

    def iteration(self, rl: RL, state: APPOState) -> tuple[APPOState, Metrics]:
        """Actors unroll the broadcast policy; the learner learns from all their steps."""
        params = rl.broadcast(self.acting(state))
        trajectory = rl.unroll(self.act, params, self.unroll_length, bootstrap=self.value)
        batch = rl.gather(trajectory)
        return self.learn(rl, state, batch)
