"""Advantage-weighted actor-critic, https://arxiv.org/abs/2006.09359.

The critics learn the value of the policy; the policy is fitted to recorded actions, weighted by
their advantage over its own. It learns in the same way from recorded data and, afterward, in the
environment. Unusual here: weights are clipped instead of normalized over a batch, and with discrete
actions the policy's value is an expectation, not a sample.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import optax

from dovetail.algorithm import RL, Algorithm, Carry, Correction, Metrics, Task, Timestep
from dovetail.blocks.exploring import (
    PolicyExtras,
    PolicyParams,
    check_bounded,
    random_action,
    random_log_prob,
)
from dovetail.blocks.gradient_loop import apply_gradients, gradient_keys, gradient_loop
from dovetail.blocks.learner_state import LearnerState
from dovetail.blocks.offline import (
    bounded_log_prob,
    bounded_sample,
    init_policy,
    negative_log_likelihood,
    recorded_rows,
)
from dovetail.blocks.options import check_options
from dovetail.blocks.replayed import Batch, Row, rows_of, update_priorities
from dovetail.blocks.sampling import Sampling, check_replay_options, new_learner_state
from dovetail.blocks.targets import soft_update
from dovetail.envs.interface import Continuous, Discrete
from dovetail.functions.distributions import Categorical, Gaussian, output_size
from dovetail.functions.offline import advantage_weights
from dovetail.networks.critics import Critics, of_actions
from dovetail.networks.encoder import Network
from dovetail.networks.policy_network import PolicyNetwork
from dovetail.replay.data import Data
from dovetail.replay.replay import Replay

LOG_STD = (-5.0, 2.0)
"""Bounds of the policy's log standard deviation."""


@dataclass(frozen=True)
class AWAC(Algorithm):
    """Advantage-weighted actor-critic: imitates actions that beat the policy's own."""

    actions: ClassVar[tuple[type, ...]] = (Discrete, Continuous)
    correction: ClassVar[Correction] = Correction("learning off-policy", None)
    takes_data: ClassVar[bool] = True
    needs_data: ClassVar[bool] = True

    unroll_length: int = 1
    """Steps each environment takes between two updates."""
    gradient_steps: int = 0
    """Gradient steps of an update, in one compiled call; 0 for one per environment step, or 20
    without environment steps."""
    batch_size: int = 256
    """Transitions of a gradient step."""
    learning_rate: float = 3e-4
    """Adam's step size."""
    gamma: float = 0.99
    """Discount factor γ."""
    n_step: int = 1
    """Steps of rewards before the target bootstraps from a value."""
    tau: float = 0.005
    """Target-network rate τ: their step toward the networks, with each gradient step."""
    inverse_temperature: float = 1.0
    """Preference β for better actions: 0 weighs all alike, as behavior cloning does."""
    weight_limit: float = 100.0
    """Maximum weight of an action."""
    num_critics: int = 2
    """Number of critics, of which the lowest value counts."""
    buffer_size: int = 200_000
    """Maximum number of transitions in the replay."""
    learning_starts: int = 1_000
    """Transitions in the replay before learning begins."""
    prioritized: bool = False
    """Whether to sample transitions with larger errors more often,
    https://arxiv.org/abs/1511.05952."""
    priority_exponent: float = 0.6
    """Exponent of the error in a priority; 0 samples uniformly."""
    importance_exponent: float = 0.4
    """Exponent of the importance weights against the bias of priorities; 1 removes it."""
    data_share: float = 0.5
    """Fraction of recorded transitions in a batch when there are replayed ones as well."""
    normalize_observations: bool = False
    """Whether to normalize observations by their running mean and variance."""
    hidden_sizes: tuple[int, ...] = (256, 256)
    """Sizes of the hidden layers."""
    activation: str = "relu"
    """Activation of the hidden layers: elu, gelu, relu, silu or tanh."""
    network: Network = "auto"
    """Network before the hidden layers: auto, mlp, cnn, impala, file.py:Net or module:Net."""

    def __post_init__(self) -> None:
        check_replay_options(self)
        check_options(
            self,
            positive=("weight_limit",),
            non_negative=("inverse_temperature",),
            at_least_one=("num_critics",),
        )

    def bind(self, task: Task) -> Self:
        """The same options with a task; refused where actions have no bounds to explore within."""
        check_bounded(type(self).__name__, task)
        return super().bind(task)

    @property
    def discrete(self) -> bool:
        """Whether actions are discrete."""
        return isinstance(self.task.env.action, Discrete)

    @property
    def actor(self) -> PolicyNetwork:
        """The policy's network: a logit for each action, or the mean of each entry."""
        env = self.task.env
        return PolicyNetwork(
            env.observation,
            output_size(env.action),
            self.hidden_sizes,
            self.activation,
            network=self.network,
        )

    @property
    def critic(self) -> Critics:
        """The critics' networks, Q(s, a): of an action's entries, or with a value per action."""
        env, layers = self.task.env, (self.hidden_sizes, self.activation)
        if isinstance(env.action, Continuous):
            return Critics(
                env.observation, env.action.size, 1, self.num_critics, *layers, network=self.network
            )
        return Critics(
            env.observation,
            0,
            output_size(env.action),
            self.num_critics,
            *layers,
            network=self.network,
        )

    @property
    def sampling(self) -> Sampling:
        """How an update draws its batches from the replay and from recorded data."""
        return Sampling(self)

    def init(self, key: jax.Array) -> LearnerState:
        """New networks, target critics equal to them, an empty replay."""
        network_key, key = jax.random.split(key)
        actor_key, critic_key = jax.random.split(network_key)
        params = {
            "actor": init_policy(self.actor, self.task.env.action, actor_key),
            "critics": self.critic.init(critic_key),
        }
        adam = optax.adam(self.learning_rate)
        return new_learner_state(
            self.sampling, key, adam, params, target={"critics": params["critics"]}
        )

    def policy(self, params: Any, observation: Any) -> Categorical | Gaussian:
        """π(a|s): discrete, or a Gaussian with its mean in [-1, 1] and one deviation for all s."""
        outputs = self.actor.apply(params, observation)
        if self.discrete:
            return Categorical(outputs)
        return Gaussian(jnp.tanh(outputs), jnp.clip(params["log_std"], *LOG_STD))

    def values(self, params: Any, observation: Any, action: jax.Array) -> jax.Array:
        """Q(s, a) of every critic, [critics, n]."""
        if not self.discrete:
            return self.critic.apply(params, observation, action)[..., 0]
        return of_actions(self.critic.apply(params, observation), action)

    def acting(self, state: LearnerState) -> PolicyParams:
        """The policy's weights; no action is random, since it learns from recorded data first."""
        return PolicyParams(state.params["actor"], state.moments, state.steps < 0)

    def acting_policy(self, params: PolicyParams, timestep: Timestep) -> Categorical | Gaussian:
        """π at an actor's observation."""
        seen = self.sampling.normalized(params.moments, timestep.observation)
        return self.policy(params.network, seen)

    def act(
        self, params: PolicyParams, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[jax.Array, PolicyExtras, Carry]:
        """An action of the policy, clipped to its bounds."""
        policy, space = self.acting_policy(params, timestep), self.task.env.action
        action = bounded_sample(policy, key)
        log_prob = bounded_log_prob(policy, action)
        action = jnp.where(params.warming, random_action(space, key), action)
        log_prob = jnp.where(params.warming, random_log_prob(space), log_prob)
        return action, PolicyExtras(log_prob), carry

    def log_prob(
        self, params: PolicyParams, carry: Carry, timestep: Timestep, action: jax.Array
    ) -> jax.Array:
        """Log-probability with which `act` takes an action."""
        own = bounded_log_prob(self.acting_policy(params, timestep), action)
        return jnp.where(params.warming, random_log_prob(self.task.env.action), own)

    def greedy(
        self, params: PolicyParams, carry: Carry, timestep: Timestep
    ) -> tuple[jax.Array, Carry]:
        """The policy's mode."""
        return self.acting_policy(params, timestep).mode(), carry

    def expected(
        self, critics: Any, observation: Any, policy: Categorical | Gaussian, key: jax.Array
    ) -> jax.Array:
        """min Q(s, a) [n] with a from the policy: a sample, or the sum over discrete actions."""
        if isinstance(policy, Categorical):
            values = self.critic.apply(critics, observation).min(axis=0)
            return jnp.sum(jax.nn.softmax(policy.logits) * values, axis=-1)
        return self.values(critics, observation, bounded_sample(policy, key)).min(axis=0)

    def goal(self, state: LearnerState, batch: Batch, key: jax.Array) -> jax.Array:
        """The critics' target [n]: y = r + γ min Q'(s', a') with a' from the policy."""
        policy = self.policy(state.params["actor"], batch.following)
        following = self.expected(state.target["critics"], batch.following, policy, key)
        return batch.reward + batch.discount * following

    def critic_loss(
        self, params: Any, batch: Batch, goal: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        """(loss, (errors [n], metrics)): mean of (Q(s, a) - y)², summed over the critics."""
        values = self.values(params, batch.observation, batch.action)
        errors = values - goal
        loss = jnp.mean(batch.weights * jnp.sum(jnp.square(errors), axis=0))
        metrics = {"critic_loss": loss, "value": jnp.mean(values)}
        return loss, (jnp.mean(jnp.abs(errors), axis=0), metrics)

    def actor_loss(
        self, params: Any, critics: Any, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """(loss, metrics): mean of -exp(β A) log π(a|s), with A the advantage of the recorded
        action over the policy's."""
        policy = self.policy(params, batch.observation)
        fixed = jax.lax.stop_gradient(policy)
        taken = self.values(critics, batch.observation, batch.action).min(axis=0)
        usual = self.expected(critics, batch.observation, fixed, key)
        weights = advantage_weights(taken - usual, self.inverse_temperature, self.weight_limit)
        loss = negative_log_likelihood(policy, batch, weights)
        return loss, {"actor_loss": loss, "mean_weight": jnp.mean(weights)}

    def gradient_step(
        self, rl: RL, state: LearnerState, batch: Batch, keys: jax.Array
    ) -> tuple[LearnerState, jax.Array, Metrics]:
        """One step of critics and policy along their gradients; then the target critics follow."""
        goal = self.goal(state, batch, keys[0])
        critics, (errors, found) = jax.grad(self.critic_loss, has_aux=True)(
            state.params["critics"], batch, goal
        )
        actor, metrics = jax.grad(self.actor_loss, has_aux=True)(
            state.params["actor"], state.params["critics"], batch, keys[1]
        )
        gradients = {"actor": actor, "critics": critics}
        state = apply_gradients(rl, optax.adam(self.learning_rate), state, gradients)
        target = soft_update(state.target, state.params, self.tau)
        return state._replace(target=target), errors, found | metrics

    def learn(
        self, rl: RL, state: LearnerState, batches: Batch, enough: jax.Array
    ) -> tuple[LearnerState, jax.Array, Metrics]:
        """(state, errors [K, n], metrics): a gradient step on each of K batches [K, n, …], if there
        is enough to learn from."""
        keys = gradient_keys(rl, state, batches)
        return gradient_loop(partial(self.gradient_step, rl), state, batches, keys, enough)

    def iteration(self, rl: RL, state: LearnerState) -> tuple[LearnerState, Metrics]:
        """Actors insert their steps into the replay; the learner learns from sampled batches."""
        replay, sampling = state.replay, self.sampling
        steps = replayed = recorded = None
        if isinstance(replay, Replay):  # unless it learns from recorded data alone
            acting = rl.broadcast(self.acting(state))
            steps = rl.unroll(self.act, acting, self.unroll_length)
            replay = rl.insert(replay, steps, *rows_of(steps))
            replay, replayed = rl.sample(replay, sampling.draws(state))
        if isinstance(state.data, Data):
            recorded = rl.recall(state.data, sampling.recorded_draws(state))
        moments = sampling.moments(rl, state.moments, steps, recorded)
        enough = sampling.enough(replayed)
        batches = sampling.batches(rl, moments, replayed, recorded)
        state, errors, metrics = self.learn(rl, state._replace(moments=moments), batches, enough)
        if self.prioritized:
            replay = update_priorities(rl, replay, replayed, errors)
        return state._replace(replay=replay, updates=state.updates + 1), metrics

    @property
    def offline_steps(self) -> int:
        """Gradient steps of an update on recorded data alone."""
        return self.sampling.steps

    @property
    def recorded_window(self) -> int:
        """Steps of a recorded transition."""
        return self.n_step

    @property
    def recorded_draws_each(self) -> int:
        """Recorded transitions of an update."""
        return self.sampling.steps * self.sampling.recorded

    def recorded_row(self, rows: Any) -> Row:
        """Rows of a dataset as the learner keeps them."""
        return recorded_rows(self.task.env.action, rows)
