"""Conservative Q-learning for continuous actions, https://arxiv.org/abs/2006.04779.

Soft actor-critic for recorded data: the critics' loss also pushes down the values of actions that
the policy or chance would take, and pushes up those of the recorded actions, so that no untried
action looks better than the recorded ones. Unusual here: the target has no entropy in it, as in
the authors' code, and the weight of the penalty is fixed.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

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
from dovetail.blocks.gradient_loop import apply_gradients, delayed, gradient_keys, gradient_loop
from dovetail.blocks.learner_state import LearnerState
from dovetail.blocks.offline import recorded_rows
from dovetail.blocks.options import check_options
from dovetail.blocks.replayed import Batch, Row, rows_of, update_priorities
from dovetail.blocks.sampling import Sampling, check_replay_options, new_learner_state
from dovetail.blocks.targets import random_subset, soft_update
from dovetail.envs.interface import Continuous
from dovetail.errors import check_option
from dovetail.functions.distributions import SquashedGaussian
from dovetail.functions.offline import conservative_gap
from dovetail.keys import on_axis
from dovetail.networks.critics import Critics
from dovetail.networks.encoder import Network
from dovetail.networks.policy_network import PolicyNetwork
from dovetail.replay.data import Data
from dovetail.replay.replay import Replay

LOG_STD = (-20.0, 2.0)
"""Bounds of the policy's log standard deviation."""


class Goal(NamedTuple):
    """What the critics' loss compares with, for each transition."""

    values: jax.Array
    """Target of the recorded action's value [n]."""
    others: jax.Array
    """Actions whose values are pushed down, [n, count, size]."""
    log_densities: jax.Array
    """Log-densities of these actions plus the logarithm of their number, [n, count]."""


@dataclass(frozen=True)
class CQL(Algorithm):
    """Conservative Q-learning: soft actor-critic that distrusts untried actions."""

    actions: ClassVar[tuple[type, ...]] = (Continuous,)
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
    cql_alpha: float = 5.0
    """Weight of the gap between the values of other actions and of the recorded ones."""
    samples: int = 10
    """Other actions drawn for each transition, in three ways: uniformly, and from the policy at
    both of its observations."""

    num_critics: int = 2
    """Number of critics."""
    subset: int = 2
    """Critics, drawn anew for each gradient step, whose lowest value is the target."""
    mean_critic: bool = False
    """Whether the policy maximizes the critics' mean, as in REDQ and DroQ, or their minimum."""
    policy_delay: int = 1
    """Policy delay: gradient steps of the critics for each of the policy."""
    layer_norm: bool = False
    """Whether to normalize the critics' hidden layers, as in DroQ."""
    dropout: float = 0.0
    """Dropout rate of the critics' hidden layers, as in DroQ."""
    temperature: float = 1.0
    """Weight α of the entropy; where it is learned, its first value."""
    learn_temperature: bool = True
    """Whether to learn the temperature."""
    entropy_per_action: float = -1.0
    """Entropy at which the learned temperature keeps the policy, per entry of an action."""
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
            positive=("temperature",),
            non_negative=("cql_alpha",),
            at_least_one=("num_critics", "policy_delay", "samples"),
        )
        count, rate = self.num_critics, self.dropout
        check_option("subset", self.subset, 1 <= self.subset <= count, f"1 to {count}")
        check_option("dropout", rate, 0 <= rate < 1, "0 or more, less than 1")

    def bind(self, task: Task) -> Self:
        """The same options with a task; refused where actions have no bounds to explore within."""
        check_bounded(type(self).__name__, task)
        return super().bind(task)

    @property
    def actor(self) -> PolicyNetwork:
        """The policy's network: mean and log standard deviation of each entry of an action."""
        env = self.task.env
        assert isinstance(env.action, Continuous)
        return PolicyNetwork(
            env.observation,
            2 * env.action.size,
            self.hidden_sizes,
            self.activation,
            network=self.network,
        )

    @property
    def critic(self) -> Critics:
        """The critics' networks, Q(s, a)."""
        env, layers = self.task.env, (self.hidden_sizes, self.activation)
        assert isinstance(env.action, Continuous)
        size, regular = env.action.size, (self.layer_norm, self.dropout)
        return Critics(
            env.observation, size, 1, self.num_critics, *layers, *regular, network=self.network
        )

    @property
    def target_entropy(self) -> float:
        """Entropy at which the learned temperature keeps the policy."""
        assert isinstance(self.task.env.action, Continuous)
        return self.entropy_per_action * self.task.env.action.size

    @property
    def sampling(self) -> Sampling:
        """How an update draws its batches from the replay and from recorded data."""
        return Sampling(self)

    def init(self, key: jax.Array) -> LearnerState:
        """New networks, target critics equal to them, an empty replay."""
        network_key, key = jax.random.split(key)
        actor_key, critic_key = jax.random.split(network_key)
        params = {
            "actor": self.actor.init(actor_key),
            "critics": self.critic.init(critic_key),
            "log_temperature": jnp.asarray(math.log(self.temperature), jnp.float32),
        }
        adam = optax.adam(self.learning_rate)
        return new_learner_state(
            self.sampling, key, adam, params, target={"critics": params["critics"]}
        )

    def policy(self, params: Any, observation: Any) -> SquashedGaussian:
        """π(a|s), a Gaussian squashed to [-1, 1] by tanh."""
        mean, log_std = jnp.split(self.actor.apply(params, observation), 2, axis=-1)
        return SquashedGaussian(mean, jnp.clip(log_std, *LOG_STD))

    def acting(self, state: LearnerState) -> PolicyParams:
        """The policy's weights; no action is random, since it learns from recorded data first."""
        return PolicyParams(state.params["actor"], state.moments, state.steps < 0)

    def acting_policy(self, params: PolicyParams, timestep: Timestep) -> SquashedGaussian:
        """π at an actor's observation."""
        seen = self.sampling.normalized(params.moments, timestep.observation)
        return self.policy(params.network, seen)

    def act(
        self, params: PolicyParams, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[jax.Array, PolicyExtras, Carry]:
        """An action of the policy."""
        space = self.task.env.action
        action, log_prob = self.acting_policy(params, timestep).sample(key)
        action = jnp.where(params.warming, random_action(space, key), action)
        log_prob = jnp.where(params.warming, random_log_prob(space), log_prob)
        return action, PolicyExtras(log_prob), carry

    def log_prob(
        self, params: PolicyParams, carry: Carry, timestep: Timestep, action: jax.Array
    ) -> jax.Array:
        """log π(a|s)."""
        own = self.acting_policy(params, timestep).log_prob(action)
        return jnp.where(params.warming, random_log_prob(self.task.env.action), own)

    def greedy(
        self, params: PolicyParams, carry: Carry, timestep: Timestep
    ) -> tuple[jax.Array, Carry]:
        """The policy's mode."""
        return self.acting_policy(params, timestep).mode(), carry

    def goal(self, state: LearnerState, batch: Batch, keys: jax.Array) -> Goal:
        """y = r + γ min Q'(s', a') with a' from π, and the other actions."""
        after = self.policy(state.params["actor"], batch.following)
        before = self.policy(state.params["actor"], batch.observation)
        n, size = after.mean.shape
        uniform_key, own_key = jax.random.split(keys[3])
        uniform = jax.random.uniform(uniform_key, (n, self.samples, size), minval=-1.0, maxval=1.0)
        flat = jnp.full((n, self.samples), size * math.log(0.5))
        own, own_densities = _several(before, self.samples).sample(own_key)
        next_, next_densities = _several(after, 1 + self.samples).sample(keys[0])
        targets = random_subset(state.target["critics"], self.subset, keys[1])
        following = self.critic.apply(targets, batch.following, next_[:, 0], keys[2])[..., 0]
        log_densities = jnp.concatenate([flat, own_densities, next_densities[:, 1:]], axis=1)
        return Goal(
            values=batch.reward + batch.discount * following.min(axis=0),
            others=jnp.concatenate([uniform, own, next_[:, 1:]], axis=1),
            log_densities=log_densities + math.log(3 * self.samples),
        )

    def critic_loss(
        self, params: Any, batch: Batch, goal: Goal, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        """(loss, (errors [n], metrics)): mean of (Q(s, a) - y)² and the weighted gap, summed over
        the critics."""
        actions = jnp.concatenate([batch.action[:, None], goal.others], axis=1)
        n, count, size = actions.shape
        observation = jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), batch.observation)
        rows = on_axis(key, 0, count)  # dropout draws `count` rows for each transition
        found = self.critic.apply(params, observation, actions.reshape(n * count, size), rows)
        values = found.reshape(-1, n, count)  # [critics, n, count]; the recorded action is first
        taken = values[..., 0]
        errors = taken - goal.values
        gap = conservative_gap(values[..., 1:], taken, goal.log_densities)
        costs = jnp.sum(jnp.square(errors) + self.cql_alpha * gap, axis=0)
        loss = jnp.mean(batch.weights * costs)
        metrics = {
            "critic_loss": loss,
            "value": jnp.mean(taken),
            "conservative_gap": jnp.mean(gap),
        }
        return loss, (jnp.mean(jnp.abs(errors), axis=0), metrics)

    def actor_loss(
        self, params: Any, state: LearnerState, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """(loss, metrics): mean of α log π(a|s) - Q(s, a), with a drawn from π."""
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
        """One step of the critics, and in every `policy_delay`-th step of policy and temperature,
        along their gradients; then the target critics follow."""
        adam = optax.adam(self.learning_rate)
        goal = self.goal(state, batch, keys)
        critics, (errors, found) = jax.grad(self.critic_loss, has_aux=True)(
            state.params["critics"], batch, goal, keys[3]
        )

        def improve(after: LearnerState) -> tuple[LearnerState, Metrics]:
            actor, metrics = jax.grad(self.actor_loss, has_aux=True)(
                state.params["actor"], state, batch, keys[4]
            )
            gradients = {"actor": actor}
            if self.learn_temperature:  # the gradient of log α · (entropy - target entropy)
                gradients["log_temperature"] = metrics["entropy"] - self.target_entropy
            return apply_gradients(rl, adam, after, gradients), metrics

        after = apply_gradients(rl, adam, state, {"critics": critics})
        after, metrics = delayed(improve, after, self.policy_delay)
        target = soft_update(after.target, after.params, self.tau)
        return after._replace(target=target), errors, found | metrics

    def learn(
        self, rl: RL, state: LearnerState, batches: Batch, enough: jax.Array
    ) -> tuple[LearnerState, jax.Array, Metrics]:
        """(state, errors [K, n], metrics): a gradient step on each of K batches [K, n, …], if there
        is enough to learn from."""
        keys = gradient_keys(rl, state, batches)
        step = partial(self.gradient_step, rl)
        return gradient_loop(step, state, batches, keys, enough, delay=self.policy_delay)

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


def _several(policy: SquashedGaussian, count: int) -> SquashedGaussian:
    """A distribution of `count` independent actions for each one, [n, count, size]."""
    return SquashedGaussian(*(jnp.repeat(x[:, None], count, axis=1) for x in policy))
