"""Distributed distributional deterministic policy gradient, https://arxiv.org/abs/1804.08617.

DDPG whose critic learns the distribution of returns over fixed atoms, from n-step transitions. The
many actors are up to the strategy: under `actor-learner`, with priorities, it is Ape-X
DDPG, https://arxiv.org/abs/1803.00933.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import optax

from dovetail.algorithm import RL, Algorithm, Carry, Correction, Metrics, Task, Timestep
from dovetail.blocks.exploring import PolicyParams, check_bounded, random_action
from dovetail.blocks.gradient_loop import apply_gradients, gradient_keys, gradient_loop
from dovetail.blocks.learner_state import LearnerState
from dovetail.blocks.offline import recorded_rows
from dovetail.blocks.options import check_options
from dovetail.blocks.replayed import Batch, Row, rows_of, update_priorities
from dovetail.blocks.sampling import Sampling, check_replay_options, new_learner_state
from dovetail.blocks.targets import soft_update
from dovetail.envs.interface import Continuous
from dovetail.errors import check_option
from dovetail.functions.exploration import add_noise
from dovetail.functions.value_distributions import atoms, cross_entropy, expected, project
from dovetail.networks.critics import Critics
from dovetail.networks.encoder import Network
from dovetail.networks.policy_network import PolicyNetwork
from dovetail.replay.data import Data
from dovetail.replay.replay import Replay


@dataclass(frozen=True)
class D4PG(Algorithm):
    """DDPG with a distributional critic and n-step returns."""

    actions: ClassVar[tuple[type, ...]] = (Continuous,)
    correction: ClassVar[Correction] = Correction("learning off-policy", None)
    takes_data: ClassVar[bool] = True

    unroll_length: int = 1
    """Steps each environment takes between two updates."""
    gradient_steps: int = 0
    """Gradient steps of an update, in one compiled call; 0 for one per environment step, or 20
    without environment steps."""
    batch_size: int = 256
    """Transitions of a gradient step."""
    learning_rate: float = 1e-3
    """Adam's step size."""
    gamma: float = 0.99
    """Discount factor γ."""
    n_step: int = 3
    """Steps of rewards before the target bootstraps from a value."""
    tau: float = 0.005
    """Target-network rate τ: their step toward the networks, with each gradient step."""
    atoms: int = 101
    """Returns over which the critic's distribution is spread."""
    v_min: float = -500.0
    """Lowest of these returns; lower ones are clipped to it."""
    v_max: float = 500.0
    """Highest of these returns; higher ones are clipped to it."""

    exploration_noise: float = 0.1
    """Standard deviation of the noise on actions in [-1, 1] while training."""
    buffer_size: int = 200_000
    """Maximum number of transitions in the replay."""
    learning_starts: int = 1_000
    """Transitions in the replay before learning begins; until then actions are random."""
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
        check_options(self, non_negative=("exploration_noise",))
        check_option("atoms", self.atoms, self.atoms >= 2, "2 or more")
        low, high = self.v_min, self.v_max
        check_option("v_max", high, high > low, f"more than --v-min, which is {low}")

    def bind(self, task: Task) -> Self:
        """The same options with a task; refused where actions have no bounds to explore within."""
        check_bounded(type(self).__name__, task)
        return super().bind(task)

    @property
    def actor(self) -> PolicyNetwork:
        """The policy's network: one output for each entry of an action."""
        env = self.task.env
        assert isinstance(env.action, Continuous)
        return PolicyNetwork(
            env.observation,
            env.action.size,
            self.hidden_sizes,
            self.activation,
            network=self.network,
        )

    @property
    def critic(self) -> Critics:
        """The critic's network: a logit for each atom."""
        env = self.task.env
        assert isinstance(env.action, Continuous)
        size, layers = env.action.size, (self.hidden_sizes, self.activation)
        return Critics(env.observation, size, self.atoms, 1, *layers, network=self.network)

    @property
    def support(self) -> jax.Array:
        """The atoms z [k]."""
        return atoms(self.v_min, self.v_max, self.atoms)

    @property
    def sampling(self) -> Sampling:
        """How an update draws its batches from the replay and from recorded data."""
        return Sampling(self)

    def init(self, key: jax.Array) -> LearnerState:
        """New networks, target networks equal to them, an empty replay."""
        network_key, key = jax.random.split(key)
        actor_key, critic_key = jax.random.split(network_key)
        params = {"actor": self.actor.init(actor_key), "critics": self.critic.init(critic_key)}
        adam = optax.adam(self.learning_rate)
        return new_learner_state(self.sampling, key, adam, params, target=dict(params))

    def policy(self, params: Any, observation: Any) -> jax.Array:
        """μ(s), the action in [-1, 1]."""
        return jnp.tanh(self.actor.apply(params, observation))

    def values(self, params: Any, observation: Any, action: jax.Array) -> jax.Array:
        """Q(s, a), the mean of the critic's distribution, [1, n]."""
        return expected(self.critic.apply(params, observation, action), self.support)

    def acting(self, state: LearnerState) -> PolicyParams:
        """The policy's weights; actions are random until the first gradient step."""
        return PolicyParams(state.params["actor"], state.moments, state.steps < 1)

    def act(
        self, params: PolicyParams, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[jax.Array, tuple[()], Carry]:
        """The policy's action with noise; a random action at first."""
        action, _ = self.greedy(params, carry, timestep)
        action = add_noise(key, action, self.exploration_noise)
        random = random_action(self.task.env.action, key)
        return jnp.where(params.warming, random, action), (), carry

    def greedy(
        self, params: PolicyParams, carry: Carry, timestep: Timestep
    ) -> tuple[jax.Array, Carry]:
        """The policy's action."""
        seen = self.sampling.normalized(params.moments, timestep.observation)
        return self.policy(params.network, seen), carry

    def goal(self, state: LearnerState, batch: Batch) -> jax.Array:
        """The critic's target [n, k]: the distribution of r + γ z at s', projected on the atoms."""
        action = self.policy(state.target["actor"], batch.following)
        logits = self.critic.apply(state.target["critics"], batch.following, action)[0]
        moved = batch.reward[:, None] + batch.discount[:, None] * self.support
        return project(moved, jax.nn.softmax(logits), self.support)

    def critic_loss(
        self, params: Any, batch: Batch, goal: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        """(loss, (errors [n], metrics)): mean cross-entropy, which is each transition's error."""
        logits = self.critic.apply(params, batch.observation, batch.action)[0]
        errors = cross_entropy(logits, goal)
        loss = jnp.mean(batch.weights * errors)
        metrics = {"critic_loss": loss, "value": jnp.mean(expected(logits, self.support))}
        return loss, (errors, metrics)

    def actor_loss(self, params: Any, critics: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        """(loss, metrics): mean of -Q(s, μ(s))."""
        action = self.policy(params, batch.observation)
        loss = -jnp.mean(self.values(critics, batch.observation, action))
        return loss, {"actor_loss": loss}

    def gradient_step(
        self, rl: RL, state: LearnerState, batch: Batch, keys: jax.Array
    ) -> tuple[LearnerState, jax.Array, Metrics]:
        """One step of critic and policy along their gradients; then the target networks follow."""
        critics, (errors, found) = jax.grad(self.critic_loss, has_aux=True)(
            state.params["critics"], batch, self.goal(state, batch)
        )
        actor, metrics = jax.grad(self.actor_loss, has_aux=True)(
            state.params["actor"], state.params["critics"], batch
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
