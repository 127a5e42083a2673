"""Asynchronous advantage actor-critic, https://arxiv.org/abs/1602.01783.

Actors compute gradients from their own unrolls and send only these; the learner applies them, even
if its weights have moved on. Each actor sends the gradient of its summed loss and its share of
valid steps, so that however environments are split, the quotient is the gradient of the whole
batch: synchronously it is A2C. Unusual here: one optimizer, the learner's (the paper's shared one),
which is Adam in place of RMSProp.
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
    advantages_and_targets,
    first_row,
)
from dovetail.blocks.normalizing import discounted_return, normalized
from dovetail.blocks.optimizers import adam_with_clipping, annealed, apply_gradients, updates_in
from dovetail.blocks.options import check_network, check_options
from dovetail.functions.distributions import Distribution
from dovetail.functions.losses import entropy_loss, policy_gradient, value_loss
from dovetail.functions.normalization import (
    Moments,
    around,
    batch_sums,
    initial_moments,
    scale,
    update,
)
from dovetail.networks.actor_critic import ActorCritic
from dovetail.networks.encoder import Network


class A3CState(NamedTuple):
    """The learner's state."""

    params: Any
    optimizer: Any
    moments: Moments
    """Of the observations."""
    return_moments: Moments
    """Of the discounted returns."""
    key: jax.Array
    updates: jax.Array


class Contribution(NamedTuple):
    """What an actor sends: averages over all its steps, in which invalid ones count as 0."""

    gradients: Any
    metrics: Metrics
    share: jax.Array
    """Of its steps that are valid."""
    observations: Any
    """`Sums` of observations; empty unless they are normalized."""
    returns: Any
    """`Sums` of discounted returns; empty unless rewards are normalized."""


@dataclass(frozen=True)
class A3C(Algorithm):
    """Asynchronous advantage actor-critic: actors send gradients, the learner applies them."""

    correction: ClassVar[Correction] = Correction("nothing, but tolerates stale gradients", None)

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

    def init(self, key: jax.Array) -> A3CState:
        """New weights, a fresh optimizer, no steps seen."""
        network_key, key = jax.random.split(key)
        params = self.actor_critic.init(network_key)
        return A3CState(
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

    def acting(self, state: A3CState) -> ActorCriticParams:
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

    def contribute(
        self, params: ActorCriticParams, return_moments: Moments, batch: Trajectory
    ) -> Contribution:
        """The actor's part: gradients of its own unroll, at the weights it was sent."""
        valid = batch.valid.astype(jnp.float32)
        # Only the learner knows everyone's returns: rewards are scaled as of the update before.
        reward = scale(return_moments, batch.reward) if self.normalize_rewards else batch.reward
        advantages, targets = advantages_and_targets(batch, reward, self.gamma, self.gae_lambda)
        samples = Samples(
            observation=normalized(batch.observation, params.moments, self.normalize_observations),
            action=batch.action,
            log_prob=(),
            value=(),
            advantage=advantages,
            target=targets,
            weights=valid,
            first=batch.first,
            memory=batch.carry.memory,
        )
        gradients, metrics = jax.grad(self.loss, has_aux=True)(params.network, samples)
        sums = jax.tree.map(lambda x: x / valid.size, self.sums(batch, valid))
        return Contribution(gradients, metrics, jnp.mean(valid), *sums)

    def sums(self, batch: Trajectory, valid: jax.Array) -> tuple[Any, Any]:
        """`Sums` of observations and of discounted returns, each empty unless normalized.

        They are taken around 0: the running means of actors with different weights differ.
        """
        observations: Any = ()
        returns: Any = ()
        if self.normalize_observations:
            start = initial_moments(self.task.env.observation)
            observations = batch_sums(start, batch.observation, valid)
        if self.normalize_rewards:
            discounted = self.gamma * batch.extras.discounted_return + batch.reward
            returns = batch_sums(initial_moments(discounted[0, 0]), discounted, valid)
        return observations, returns

    def apply(self, state: A3CState, contribution: Contribution) -> tuple[A3CState, Metrics]:
        """The learner's part: one step along the gradient over all valid steps."""
        share = jnp.where(contribution.share > 0, contribution.share, 1.0)
        gradients, metrics = jax.tree.map(
            lambda x: x / share, (contribution.gradients, contribution.metrics)
        )
        params, optimizer = apply_gradients(
            self.optimizer(), gradients, state.optimizer, state.params
        )
        return state._replace(
            params=params,
            optimizer=optimizer,
            moments=self.updated(state.moments, contribution.observations),
            return_moments=self.updated(state.return_moments, contribution.returns),
            updates=state.updates + 1,
        ), metrics

    def updated(self, moments: Moments, averages: Any) -> Moments:
        """The moments with a whole batch added, given its averaged sums; unchanged if empty."""
        if not averages:
            return moments
        steps = self.unroll_length * self.task.num_envs
        sums = jax.tree.map(lambda x: steps * x, averages)
        return update(moments, around(moments.mean, sums))

    def iteration(self, rl: RL, state: A3CState) -> tuple[A3CState, Metrics]:
        """Actors unroll and differentiate; the learner applies their averaged gradients."""
        params, return_moments = rl.broadcast((self.acting(state), state.return_moments))
        trajectory = rl.unroll(self.act, params, self.unroll_length, bootstrap=self.value)
        contribution = rl.reduce(self.contribute(params, return_moments, trajectory))
        return self.apply(state, contribution)
