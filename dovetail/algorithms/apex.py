"""Ape-X DQN, https://arxiv.org/abs/1803.00933: many actors, one prioritized replay, one learner.

Each environment's actor has an ε of its own, from 0.4 down to nearly 0, so that the replay always
holds both exploring and greedy behavior. Actors compute the initial priority of each step from the
values they acted on, so the learner need not see an item to know how much it can teach. Double
Q-learning with dueling networks and n-step returns.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dovetail.algorithm import RL, Algorithm, Carry, Correction, Metrics, Timestep, Trajectory
from dovetail.blocks.options import check_network, check_options
from dovetail.blocks.value_based import (
    LEAST_PRIORITY,
    ItemBatch,
    Learned,
    batches_of,
    new_priorities,
    row_shapes,
    rows_of,
    scan_batches,
)
from dovetail.envs.interface import Discrete
from dovetail.errors import check_option
from dovetail.functions.bootstrapping import chosen, n_step, row
from dovetail.functions.exploration import epsilon_greedy, epsilon_greedy_log_prob, ladder
from dovetail.functions.returns import n_step_returns, successor_values
from dovetail.functions.vectors import from_vector, to_vector
from dovetail.networks.encoder import Network
from dovetail.networks.q_network import QNetwork
from dovetail.replay.replay import Replay
from dovetail.replay.sample import Sample
from dovetail.replay.table import Prioritized, Table, Transitions


class ApeXState(NamedTuple):
    """The learner's state."""

    params: jax.Array
    """The network's weights, as one vector."""
    target: jax.Array
    """The target network's weights."""
    optimizer: Any
    replay: Replay
    key: jax.Array
    updates: jax.Array


class ApeXExtras(NamedTuple):
    """What `act` adds to the trajectory."""

    taken: jax.Array
    """The value of the action taken."""
    best: jax.Array
    """The highest value of an action."""
    log_prob: jax.Array


@dataclass(frozen=True)
class ApeX(Algorithm):
    """DQN with many actors that explore differently and prioritize what they insert."""

    actions: ClassVar[tuple[type, ...]] = (Discrete,)
    correction: ClassVar[Correction] = Correction("learning off-policy", None)

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
    n_step: int = 3
    """Steps of rewards in a target before a value stands for the rest."""
    tau: float = 0.01
    """Target-network rate τ: its step toward the network, with each gradient step."""
    double: bool = True
    """Whether the network chooses the action that the target network values,
    https://arxiv.org/abs/1509.06461."""
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
    dueling: bool = True
    """Whether the state's value and the actions' advantages have separate heads,
    https://arxiv.org/abs/1511.06581."""
    buffer_size: int = 50_000
    """Most items in the replay."""
    learning_starts: int = 1_000
    """Items in the replay before learning begins."""
    priority_exponent: float = 0.6
    """Power of the error that is an item's priority; 0 makes all alike."""
    importance_exponent: float = 0.4
    """How much of the bias of priorities is corrected; 1 for all of it."""
    epsilon_first: float = 0.4
    """Share of random actions of the actor that explores most."""
    epsilon_power: float = 7.0
    """The last actor's share is `epsilon_first` to the power of one more than this."""

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
            fraction=(*rates, "epsilon_first"),
            non_negative=("epsilon_power",),
        )
        items = self.buffer_size
        check_option(
            "learning_starts", self.learning_starts, self.learning_starts <= items, f"1 to {items}"
        )
        check_network(self.hidden_sizes, self.activation)

    @property
    def q_network(self) -> QNetwork:
        """Outputs one value for each action."""
        env = self.task.env
        assert isinstance(env.action, Discrete)
        return QNetwork(
            env.observation,
            env.action.n,
            self.hidden_sizes,
            self.activation,
            self.dueling,
            network=self.network,
        )

    def weights(self, vector: jax.Array) -> Any:
        """The network's parameters, from the vector that holds them."""
        return from_vector(vector, jax.eval_shape(self.q_network.init, jax.random.key(0)))

    def optimizer(self) -> optax.GradientTransformation:
        """Adam on clipped gradients."""
        clip = optax.clip_by_global_norm(self.max_grad_norm)
        return optax.chain(clip, optax.adam(self.learning_rate))

    def init(self, key: jax.Array) -> ApeXState:
        """New weights, the same in the target network, and an empty replay."""
        network_key, key = jax.random.split(key)
        params = to_vector(self.q_network.init(network_key))
        sampler = Prioritized(self.priority_exponent)
        table = Table(Transitions(self.n_step), self.buffer_size, sampler)
        return ApeXState(
            params=params,
            target=params,
            optimizer=self.optimizer().init(params),
            replay=self.task.replay(table, row_shapes(self.task.env)),
            key=key,
            updates=jnp.zeros((), jnp.int32),
        )

    def epsilon(self, timestep: Timestep) -> jax.Array:
        """The share of random actions of one environment's actor, by the environment's number."""
        count = self.task.all_envs
        return ladder(self.epsilon_first, self.epsilon_power, timestep.number, count)

    def act(
        self, params: jax.Array, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[jax.Array, ApeXExtras, Carry]:
        """ε-greedy, with the values that were acted on."""
        values, epsilon = self.q_values(params, timestep), self.epsilon(timestep)
        action = epsilon_greedy(key, values, epsilon)
        log_prob = epsilon_greedy_log_prob(values, epsilon, action)
        return action, ApeXExtras(values[action], values.max(), log_prob), carry

    def greedy(
        self, params: jax.Array, carry: Carry, timestep: Timestep
    ) -> tuple[jax.Array, Carry]:
        """The action of the highest value."""
        return jnp.argmax(self.q_values(params, timestep), axis=-1).astype(jnp.int32), carry

    def value(self, params: jax.Array, carry: Carry, timestep: Timestep) -> jax.Array:
        """max Q(s, ·) of the state that `timestep` shows."""
        return self.q_values(params, timestep).max()

    def log_prob(
        self, params: jax.Array, carry: Carry, timestep: Timestep, action: jax.Array
    ) -> jax.Array:
        """The log-probability of an action."""
        values = self.q_values(params, timestep)
        return epsilon_greedy_log_prob(values, self.epsilon(timestep), action)

    def q_values(self, params: jax.Array, timestep: Timestep) -> jax.Array:
        """Q(s, ·) [actions] of the state that `timestep` shows."""
        return self.q_network.apply(self.weights(params), timestep.observation)[..., 0]

    def priorities(self, steps: Trajectory) -> jax.Array:
        """Initial priorities [T, B]: the n-step errors of the values that actors acted on. Near the
        end of the trajectory there are fewer steps to look ahead."""
        ends = steps.terminated, steps.truncated
        following = successor_values(steps.extras.best, steps.bootstrap, *ends)
        returns = n_step_returns(steps.reward, following, *ends, self.gamma, self.n_step)
        return jnp.abs(returns - steps.extras.taken) + LEAST_PRIORITY

    def loss(
        self, params: jax.Array, target: jax.Array, batch: ItemBatch
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        """(loss, (errors [n], metrics)) of n transitions: how far Q(s, a) is from r + γ Q'(s', a'),
        where a' is the best action by Q (`double`) or by Q'."""
        network, rows = self.q_network.apply, batch.rows
        weights, target_weights = self.weights(params), self.weights(target)
        steps = n_step(rows.reward, rows.terminated, batch.mask, self.gamma)
        observation = jax.tree.map(lambda x: x[:, 0], rows.observation)
        next_observation = row(rows.observation, steps.last)
        q_next = network(target_weights, next_observation)
        judged = network(weights, next_observation) if self.double else q_next
        best = jnp.argmax(judged[..., 0], axis=-1)
        q_taken = chosen(network(weights, observation), rows.action[:, 0])[:, 0]
        q_best = jax.lax.stop_gradient(chosen(q_next, best))[:, 0]
        q_target = steps.reward + steps.discount * q_best
        losses = optax.losses.huber_loss(q_taken, q_target, delta=self.huber)
        loss = jnp.mean(batch.weights * losses)
        return loss, (jnp.abs(q_taken - q_target), {"loss": loss, "value": jnp.mean(q_taken)})

    def learn(
        self, rl: RL, state: ApeXState, sample: Sample
    ) -> tuple[ApeXState, jax.Array, Metrics]:
        """(state, errors [K, n], metrics): a gradient step on each of the K sampled batches; none
        before the replay holds `learning_starts` items."""
        grad, adam = jax.grad(self.loss, has_aux=True), self.optimizer()

        def step(old: Learned, batch: ItemBatch) -> tuple[Learned, Any]:
            gradients, found = grad(old.params, old.target, batch)
            updates, optimizer = adam.update(rl.mean(gradients), old.optimizer, old.params)
            params = optax.apply_updates(old.params, updates)
            target = optax.incremental_update(params, old.target, self.tau)
            return Learned(params, target, optimizer), found

        learned = Learned(state.params, state.target, state.optimizer)
        batches = batches_of(rl, [sample], self.importance_exponent)
        enough = jnp.min(sample.size) >= self.learning_starts
        learned, errors, metrics = scan_batches(step, learned, (batches,), enough)
        return state._replace(**learned._asdict()), errors, metrics

    def iteration(self, rl: RL, state: ApeXState) -> tuple[ApeXState, Metrics]:
        """Actors insert their steps with priorities; the learner learns from samples of them, and
        gives them new priorities."""
        params = rl.broadcast(state.params)
        steps = rl.unroll(self.act, params, self.unroll_length, bootstrap=self.value)
        replay = rl.insert(state.replay, steps, *rows_of(steps), self.priorities(steps))
        key = jax.random.fold_in(state.key, state.updates)
        draws = jax.random.uniform(key, (self.gradient_steps, self.batch_size))
        replay, sample = rl.sample(replay, draws)
        state, errors, metrics = self.learn(rl, state, sample)
        priorities = new_priorities(errors, sample.keys)
        replay = rl.update_priorities(replay, sample.keys, priorities)
        return state._replace(replay=replay, updates=state.updates + 1), metrics
