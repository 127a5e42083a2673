"""Conservative Q-learning for discrete actions, https://arxiv.org/abs/2006.04779.

Double Q-learning (https://arxiv.org/abs/1509.06461) for recorded data: the loss also pushes down
the soft maximum of all actions' values and pushes up the recorded action's value. The policy is the
action of the highest value.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from dovetail.algorithm import RL, Algorithm, Carry, Correction, Metrics, Timestep
from dovetail.blocks.exploring import PolicyExtras, PolicyParams
from dovetail.blocks.gradient_loop import apply_gradients, gradient_keys, gradient_loop
from dovetail.blocks.learner_state import LearnerState
from dovetail.blocks.offline import recorded_rows
from dovetail.blocks.options import check_options
from dovetail.blocks.replayed import Batch, Row, rows_of, update_priorities
from dovetail.blocks.sampling import Sampling, check_replay_options, new_learner_state
from dovetail.blocks.targets import soft_update
from dovetail.envs.interface import Discrete
from dovetail.functions.exploration import epsilon_greedy, epsilon_greedy_log_prob
from dovetail.functions.offline import conservative_gap
from dovetail.networks.critics import Critics, of_actions
from dovetail.networks.encoder import Network
from dovetail.replay.data import Data
from dovetail.replay.replay import Replay


@dataclass(frozen=True)
class DiscreteCQL(Algorithm):
    """Conservative Q-learning: double Q-learning that distrusts untried actions."""

    actions: ClassVar[tuple[type, ...]] = (Discrete,)
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
    cql_alpha: float = 1.0
    """Weight of the gap between the values of all actions and of the recorded one."""
    epsilon: float = 0.05
    """Fraction of random actions in the environment while training."""
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
        check_options(self, non_negative=("cql_alpha",), fraction=("epsilon",))

    @property
    def critic(self) -> Critics:
        """The Q-network: Q(s, a) of each action."""
        env = self.task.env
        assert isinstance(env.action, Discrete)
        return Critics(
            env.observation,
            0,
            env.action.n,
            1,
            self.hidden_sizes,
            self.activation,
            network=self.network,
        )

    @property
    def sampling(self) -> Sampling:
        """How an update draws its batches from the replay and from recorded data."""
        return Sampling(self)

    def init(self, key: jax.Array) -> LearnerState:
        """A new Q-network, a target network equal to it, an empty replay."""
        network_key, key = jax.random.split(key)
        params = {"critics": self.critic.init(network_key)}
        adam = optax.adam(self.learning_rate)
        return new_learner_state(self.sampling, key, adam, params, target=dict(params))

    def values(self, params: Any, observation: Any) -> jax.Array:
        """Q(s, a) of all actions, [n, actions]."""
        return self.critic.apply(params, observation)[0]

    def acting(self, state: LearnerState) -> PolicyParams:
        """The Q-network's weights; it learns from recorded data first, so it never warms up."""
        return PolicyParams(state.params["critics"], state.moments, state.steps < 0)

    def act(
        self, params: PolicyParams, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[jax.Array, PolicyExtras, Carry]:
        """ε-greedy."""
        values, epsilon = self._now(params, timestep), self._epsilon(params)
        action = epsilon_greedy(key, values, epsilon)
        return action, PolicyExtras(epsilon_greedy_log_prob(values, epsilon, action)), carry

    def log_prob(
        self, params: PolicyParams, carry: Carry, timestep: Timestep, action: jax.Array
    ) -> jax.Array:
        """Log-probability of an action of the ε-greedy policy."""
        values, epsilon = self._now(params, timestep), self._epsilon(params)
        return epsilon_greedy_log_prob(values, epsilon, action)

    def greedy(
        self, params: PolicyParams, carry: Carry, timestep: Timestep
    ) -> tuple[jax.Array, Carry]:
        """The action of the highest value."""
        return jnp.argmax(self._now(params, timestep)).astype(jnp.int32), carry

    def _epsilon(self, params: PolicyParams) -> jax.Array:
        return jnp.where(params.warming, 1.0, self.epsilon)

    def _now(self, params: PolicyParams, timestep: Timestep) -> jax.Array:
        seen = self.sampling.normalized(params.moments, timestep.observation)
        return self.values(params.network, jax.tree.map(lambda x: x[None], seen))[0]

    def goal(self, state: LearnerState, batch: Batch) -> jax.Array:
        """The target [n]: y = r + γ Q'(s', argmax Q(s', ·))."""
        best = self.values(state.params["critics"], batch.following).argmax(axis=-1)
        following = self.critic.apply(state.target["critics"], batch.following)
        return batch.reward + batch.discount * of_actions(following, best)[0]

    def critic_loss(
        self, params: Any, batch: Batch, goal: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        """(loss, (errors [n], metrics)): mean of (Q(s, a) - y)² and the weighted gap."""
        values = self.values(params, batch.observation)
        taken = of_actions(values[None], batch.action)[0]
        errors = taken - goal
        gap = conservative_gap(values, taken)
        loss = jnp.mean(batch.weights * (jnp.square(errors) + self.cql_alpha * gap))
        metrics = {
            "critic_loss": loss,
            "value": jnp.mean(taken),
            "conservative_gap": jnp.mean(gap),
        }
        return loss, (jnp.abs(errors), metrics)

    def gradient_step(
        self, rl: RL, state: LearnerState, batch: Batch, keys: jax.Array
    ) -> tuple[LearnerState, jax.Array, Metrics]:
        """One step of the Q-network along its gradient; then the target network follows."""
        critics, (errors, metrics) = jax.grad(self.critic_loss, has_aux=True)(
            state.params["critics"], batch, self.goal(state, batch)
        )
        adam = optax.adam(self.learning_rate)
        state = apply_gradients(rl, adam, state, {"critics": critics})
        target = soft_update(state.target, state.params, self.tau)
        return state._replace(target=target), errors, metrics

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
