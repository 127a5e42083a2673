"""DQN, https://www.nature.com/articles/nature14236, with the parts of Rainbow as options.

Actors take ε-greedy actions and insert their steps into a replay. The learner samples transitions
from it and fits Q(s, a) to r + γ max Q'(s', ·), where Q' is a target network.

Rainbow, https://arxiv.org/abs/1710.02298, is DQN with six extensions. Each is an option of its own:
`double`, `dueling`, `n_step`, `prioritized`, `distributional`, `noisy`. Batches may also contain
recorded data, or nothing else. Unusual here: the target network moves a little with each gradient
step, in place of a full copy every few thousand steps.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dovetail.algorithm import RL, Algorithm, Carry, Correction, Metrics, Timestep
from dovetail.blocks.options import check_network, check_options
from dovetail.blocks.value_based import (
    ItemBatch,
    ItemRow,
    Learned,
    QExtras,
    QParams,
    batches_of,
    new_priorities,
    recorded_draws,
    recorded_items,
    row_shapes,
    rows_of,
    scan_batches,
)
from dovetail.envs.interface import Discrete
from dovetail.errors import UserError, check_option
from dovetail.functions.bootstrapping import chosen, n_step, row
from dovetail.functions.exploration import epsilon_greedy, epsilon_greedy_log_prob, linear
from dovetail.functions.value_distributions import atoms, categorical_td, expected
from dovetail.functions.vectors import from_vector, to_vector
from dovetail.networks.encoder import Network
from dovetail.networks.q_network import QNetwork
from dovetail.replay.data import Data
from dovetail.replay.replay import Replay
from dovetail.replay.sample import Sample
from dovetail.replay.table import Prioritized, Table, Transitions, Uniform


class DQNState(NamedTuple):
    """The learner's state."""

    params: jax.Array
    """The network's weights, as one vector."""
    target: jax.Array
    """The target network's weights."""
    optimizer: Any
    replay: Replay | tuple[()]
    """Empty offline, where nobody acts."""
    key: jax.Array
    updates: jax.Array
    data: Data | tuple[()]
    """Recorded data, if any."""


@dataclass(frozen=True)
class DQN(Algorithm):
    """Deep Q-learning from a replay; each part of Rainbow can be switched on alone."""

    actions: ClassVar[tuple[type, ...]] = (Discrete,)
    correction: ClassVar[Correction] = Correction("learning off-policy", None)
    takes_data: ClassVar[bool] = True

    unroll_length: int = 8
    """Steps each environment takes between two updates."""
    gradient_steps: int = 32
    """Gradient steps per update, in one compiled call."""
    batch_size: int = 64
    """Items per gradient step."""
    learning_rate: float = 1e-3
    """Adam's step size."""
    gamma: float = 0.99
    """Discount factor γ."""
    tau: float = 0.01
    """Target-network rate τ: its step toward the network, with each gradient step."""
    huber: float = 30.0
    """Errors up to this size count squared, larger ones linearly."""
    max_grad_norm: float = 10.0
    """Gradients are clipped to this norm."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Sizes of the hidden layers."""
    activation: str = "relu"
    """Activation of the hidden layers: elu, gelu, relu, silu or tanh."""
    network: Network = "auto"
    """Network before the hidden layers: auto, mlp, cnn, impala, file.py:Net or module:Net."""
    buffer_size: int = 50_000
    """Most items in the replay."""
    learning_starts: int = 1_000
    """Items in the replay before learning begins."""
    epsilon_start: float = 1.0
    """Share of random actions at the start; with recorded data it is `epsilon_end` at once."""
    epsilon_end: float = 0.05
    """Share of random actions in the end."""
    exploration_fraction: float = 0.2
    """Share of the run over which it falls linearly to `epsilon_end`."""
    double: bool = True
    """Whether the network chooses the action that the target network values,
    https://arxiv.org/abs/1509.06461."""
    dueling: bool = False
    """Whether the state's value and the actions' advantages have separate heads,
    https://arxiv.org/abs/1511.06581."""
    n_step: int = 1
    """Steps of rewards in a target before a value stands for the rest."""
    prioritized: bool = False
    """Whether items with larger errors are sampled more often, https://arxiv.org/abs/1511.05952."""
    priority_exponent: float = 0.6
    """Power of the error that is an item's priority; 0 makes all alike."""
    importance_exponent: float = 0.4
    """How much of the bias of priorities is corrected; 1 for all of it."""
    distributional: bool = False
    """Whether the return's distribution is learned, not just its mean,
    https://arxiv.org/abs/1707.06887."""
    atoms: int = 51
    """Returns in the support of that distribution."""
    v_min: float = -100.0
    """The lowest of them: no return should be lower."""
    v_max: float = 100.0
    """The highest of them: no return should be higher."""
    noisy: bool = False
    """Whether random weights explore in place of random actions, https://arxiv.org/abs/1706.10295."""
    data_share: float = 0.5
    """Share of recorded items in a batch, where there are replayed ones as well."""

    def __post_init__(self) -> None:
        counts = (
            "unroll_length",
            "gradient_steps",
            "batch_size",
            "n_step",
            "buffer_size",
            "learning_starts",
        )
        rates = ("gamma", "tau", "priority_exponent", "importance_exponent")
        check_options(
            self,
            positive=("learning_rate", "huber", "max_grad_norm"),
            at_least_one=counts,
            fraction=(*rates, "epsilon_start", "epsilon_end", "exploration_fraction"),
            inner_fraction=("data_share",),
        )
        items, above = self.buffer_size, self.v_max > self.v_min
        check_option(
            "learning_starts", self.learning_starts, self.learning_starts <= items, f"1 to {items}"
        )
        check_network(self.hidden_sizes, self.activation)
        check_option("atoms", self.atoms, self.atoms >= 2, "2 or more")
        check_option("v_max", self.v_max, above, f"more than {self.v_min}")

    @property
    def q_network(self) -> QNetwork:
        """Its outputs for each action: the value, or the logits of the return's distribution."""
        env = self.task.env
        assert isinstance(env.action, Discrete)
        sizes = env.observation, env.action.n, self.hidden_sizes, self.activation
        outputs = self.atoms if self.distributional else 1
        return QNetwork(*sizes, self.dueling, outputs, self.noisy, network=self.network)

    def weights(self, vector: jax.Array) -> Any:
        """The network's parameters, from the vector that holds them."""
        return from_vector(vector, jax.eval_shape(self.q_network.init, jax.random.key(0)))

    def optimizer(self) -> optax.GradientTransformation:
        """Adam on clipped gradients."""
        clip = optax.clip_by_global_norm(self.max_grad_norm)
        return optax.chain(clip, optax.adam(self.learning_rate))

    def init(self, key: jax.Array) -> DQNState:
        """New weights, the same in the target network, and an empty replay."""
        network_key, key = jax.random.split(key)
        params = to_vector(self.q_network.init(network_key))
        sampler = Prioritized(self.priority_exponent) if self.prioritized else Uniform()
        table = Table(Transitions(self.n_step), self.buffer_size, sampler)
        row = row_shapes(self.task.env)
        return DQNState(
            params=params,
            target=params,
            optimizer=self.optimizer().init(params),
            replay=self.task.replay(table, row) if self.task.online else (),
            key=key,
            updates=jnp.zeros((), jnp.int32),
            data=self.task.recorded(row, self.n_step),
        )

    def acting(self, state: DQNState) -> QParams:
        """The weights and ε, the share of random actions by now: 0 where the weights are random."""
        if self.noisy:
            return QParams(state.params, jnp.zeros(()))
        # Recorded data already holds what random actions would find at first.
        start = self.epsilon_start if self.task.data is None else self.epsilon_end
        steps = state.updates * (self.unroll_length * self.task.num_envs)
        over = self.exploration_fraction * self.task.steps
        return QParams(state.params, linear(start, self.epsilon_end, over, steps))

    def act(
        self, params: QParams, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[jax.Array, Any, Carry]:
        """ε-greedy, or greedy under random weights."""
        if self.noisy:
            noise = jax.random.normal(key, (self.q_network.noise,))
            values = self.q_values(params, timestep, noise)
            return jnp.argmax(values, axis=-1).astype(jnp.int32), (), carry
        values, epsilon = self.q_values(params, timestep), params.epsilon
        action = epsilon_greedy(key, values, epsilon)
        return action, QExtras(epsilon_greedy_log_prob(values, epsilon, action)), carry

    def greedy(self, params: QParams, carry: Carry, timestep: Timestep) -> tuple[jax.Array, Carry]:
        """The action of the highest value."""
        return jnp.argmax(self.q_values(params, timestep), axis=-1).astype(jnp.int32), carry

    def log_prob(
        self, params: QParams, carry: Carry, timestep: Timestep, action: jax.Array
    ) -> jax.Array:
        """The log-probability of an action; unknown where the weights are random."""
        if self.noisy:
            raise UserError(
                f"{type(self).__name__} with noisy weights does not say how probable its actions "
                "are: judge it as greedy."
            )
        return epsilon_greedy_log_prob(self.q_values(params, timestep), params.epsilon, action)

    def q_values(self, params: QParams, timestep: Timestep, noise: Any = None) -> jax.Array:
        """Q(s, ·) [actions] of the state that `timestep` shows."""
        weights = self.weights(params.network)
        return self.values(self.q_network.apply(weights, timestep.observation, noise))

    def values(self, outputs: jax.Array) -> jax.Array:
        """Q of the network's outputs [..., 1]; the mean of a distribution's [..., atoms]."""
        return expected(outputs, self.support) if self.distributional else outputs[..., 0]

    @property
    def support(self) -> jax.Array:
        """The returns [atoms] to which distributions give probabilities."""
        return atoms(self.v_min, self.v_max, self.atoms)

    def loss(
        self, params: jax.Array, target: jax.Array, batch: ItemBatch, noise: jax.Array | None
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        """(loss, (errors [n], metrics)) of n transitions: how far Q(s, a) is from r + γ Q'(s', a'),
        where a' is the best action by Q (`double`) or by Q'."""
        network, rows = self.q_network.apply, batch.rows
        weights, target_weights = self.weights(params), self.weights(target)
        now, later, choosing = (None, None, None) if noise is None else noise
        steps = n_step(rows.reward, rows.terminated, batch.mask, self.gamma)
        observation = jax.tree.map(lambda x: x[:, 0], rows.observation)
        next_observation = row(rows.observation, steps.last)
        q_next = network(target_weights, next_observation, later)
        judged = network(weights, next_observation, choosing) if self.double else q_next
        best = jnp.argmax(self.values(judged), axis=-1)
        q_taken = chosen(network(weights, observation, now), rows.action[:, 0])
        q_best = jax.lax.stop_gradient(chosen(q_next, best))
        losses, errors = self.td_loss(q_taken, steps.reward, steps.discount, q_best)
        loss = jnp.mean(batch.weights * losses)
        return loss, (errors, {"loss": loss, "value": jnp.mean(self.values(q_taken))})

    def td_loss(
        self, q_taken: jax.Array, reward: jax.Array, discount: jax.Array, q_next: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """(losses, errors) [n] of the outputs for (s, a), given r, γ and those for (s', a'): values
        [n, 1], or the logits of distributions [n, atoms]."""
        if self.distributional:
            return categorical_td(q_taken, reward, discount, q_next, self.support)
        target = reward + discount * q_next[:, 0]
        value = q_taken[:, 0]
        return optax.losses.huber_loss(value, target, delta=self.huber), jnp.abs(value - target)

    def noise(self, key: jax.Array) -> jax.Array | None:
        """Random numbers [K, 3, …] for the networks of each loss; None unless they are noisy."""
        if not self.noisy:
            return None
        # All at once, before the scan: inside it XLA would draw them again for every item.
        count = self.q_network.noise
        return jax.random.normal(jax.random.fold_in(key, 1), (self.gradient_steps, 3, count))

    def learn(
        self, rl: RL, state: DQNState, samples: list[Sample], enough: jax.Array, key: jax.Array
    ) -> tuple[DQNState, jax.Array, Metrics]:
        """(state, errors [K, n], metrics): a gradient step on each of the K sampled batches; none
        unless there is `enough` in the replay."""
        grad, adam = jax.grad(self.loss, has_aux=True), self.optimizer()

        def step(old: Learned, batch: ItemBatch, noise: Any) -> tuple[Learned, Any]:
            gradients, found = grad(old.params, old.target, batch, noise)
            updates, optimizer = adam.update(rl.mean(gradients), old.optimizer, old.params)
            params = optax.apply_updates(old.params, updates)
            target = optax.incremental_update(params, old.target, self.tau)
            return Learned(params, target, optimizer), found

        learned = Learned(state.params, state.target, state.optimizer)
        beta = self.importance_exponent if self.prioritized else None
        batches = batches_of(rl, samples, beta), self.noise(key)
        learned, errors, metrics = scan_batches(step, learned, batches, enough)
        return state._replace(**learned._asdict()), errors, metrics

    def iteration(self, rl: RL, state: DQNState) -> tuple[DQNState, Metrics]:
        """Actors insert their steps into the replay; the learner learns from samples of it, and of
        recorded data."""
        key = jax.random.fold_in(state.key, state.updates)
        replay, samples, enough = state.replay, list[Sample](), jnp.array(True)
        if isinstance(replay, Replay):  # There is none offline, where nobody acts.
            params = rl.broadcast(self.acting(state))
            steps = rl.unroll(self.act, params, self.unroll_length)
            replay = rl.insert(replay, steps, *rows_of(steps))
            count = self.gradient_steps, self.batch_size - self.recorded_items
            replay, sample = rl.sample(replay, jax.random.uniform(key, count))
            samples, enough = [sample], jnp.min(sample.size) >= self.learning_starts
        if isinstance(state.data, Data):
            draws = recorded_draws(key, self.gradient_steps, self.recorded_items)
            samples.append(rl.recall(state.data, draws))
        state, errors, metrics = self.learn(rl, state, samples, enough, key)
        if self.prioritized and isinstance(replay, Replay):
            keys = samples[0].keys
            replay = rl.update_priorities(replay, keys, new_priorities(errors, keys))
        return state._replace(replay=replay, updates=state.updates + 1), metrics

    # The interface of recorded data.

    @property
    def recorded_items(self) -> int:
        """Recorded items of a batch."""
        return recorded_items(self.task, self.batch_size, self.data_share)

    @property
    def offline_steps(self) -> int:
        """Gradient steps of an iteration."""
        return self.gradient_steps

    @property
    def recorded_window(self) -> int:
        """Steps of an item."""
        return self.n_step

    @property
    def recorded_draws_each(self) -> int:
        """Recorded items of an iteration."""
        return self.gradient_steps * self.recorded_items

    def recorded_row(self, rows: Any) -> ItemRow:
        """The fields of recorded rows that the replay has too."""
        return ItemRow(rows.observation, rows.action, rows.reward, rows.terminated)
