"""R2D2, https://openreview.net/forum?id=r1lyTjAqYX: Ape-X with a memory, learned from sequences.

The replay holds overlapping sequences of steps, and with every step the actor's recurrent state at
the time (the memory). The learner starts from the stored memory of a sequence's first step, lets
the network read the first steps only to refresh that memory (`burn_in`), and learns from the rest.
Values are on a scale like the square root of the return. Sequences may cross the ends of episodes;
the memory is reset where one begins. Unusual here: a gated recurrent unit that sees the observation
alone, and new sequences have the highest priority so far, since they are longer than an actor's
unroll.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dovetail.algorithm import RL, Algorithm, Carry, Correction, Metrics, Timestep, Trajectory
from dovetail.blocks.options import check_network, check_options
from dovetail.blocks.value_based import (
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
from dovetail.functions.bootstrapping import chosen
from dovetail.functions.exploration import epsilon_greedy, epsilon_greedy_log_prob, ladder
from dovetail.functions.rescaling import rescale, restore
from dovetail.functions.returns import n_step_returns
from dovetail.functions.vectors import from_vector, to_vector
from dovetail.networks.encoder import Network
from dovetail.networks.q_network import QNetwork
from dovetail.replay.replay import Replay
from dovetail.replay.sample import Sample
from dovetail.replay.table import Prioritized, Sequences, Table


class R2D2State(NamedTuple):
    """The learner's state."""

    params: jax.Array
    """The network's weights, as one vector."""
    target: jax.Array
    """The target network's weights."""
    optimizer: Any
    replay: Replay
    key: jax.Array
    updates: jax.Array


class SequenceRow(NamedTuple):
    """One step in the replay."""

    observation: Any
    action: Any
    reward: Any
    terminated: Any
    first: Any
    """Whether the step begins an episode."""
    memory: Any
    """The actor's memory before the step."""


class R2D2Extras(NamedTuple):
    """What `act` adds to the trajectory."""

    memory: Carry
    """Before the step."""
    log_prob: jax.Array


@dataclass(frozen=True)
class R2D2(Algorithm):
    """Q-learning with a recurrent network, from sequences with their stored memory."""

    actions: ClassVar[tuple[type, ...]] = (Discrete,)
    correction: ClassVar[Correction] = Correction("learning off-policy", None)

    unroll_length: int = 8
    """Steps each environment takes between two updates."""
    gradient_steps: int = 4
    """Gradient steps per update, in one compiled call."""
    batch_size: int = 32
    """Sequences per gradient step."""
    learning_rate: float = 1e-3
    """Adam's step size."""
    gamma: float = 0.99
    """Discount factor γ."""
    n_step: int = 5
    """Steps of rewards in a target before a value stands for the rest."""
    tau: float = 0.01
    """Target-network rate τ: its step toward the network, with each gradient step."""
    double: bool = True
    """Whether the network chooses the action that the target network values,
    https://arxiv.org/abs/1509.06461."""
    huber: float = 1.0
    """Errors up to this size count squared, larger ones linearly."""
    max_grad_norm: float = 10.0
    """Gradients are clipped to this norm."""
    recurrent: int = 64
    """Size of the memory."""
    hidden_sizes: tuple[int, ...] = (64,)
    """Sizes of the hidden layers behind the memory."""
    activation: str = "relu"
    """Activation of the hidden layers: elu, gelu, relu, silu or tanh."""
    network: Network = "auto"
    """Network before the hidden layers: auto, mlp, cnn, impala, file.py:Net or module:Net."""
    dueling: bool = True
    """Whether the state's value and the actions' advantages have separate heads,
    https://arxiv.org/abs/1511.06581."""
    burn_in: int = 4
    """Steps of a sequence that only refresh the memory."""
    learned: int = 16
    """Steps of a sequence that are learned from."""
    period: int = 8
    """Steps from the beginning of a sequence to that of the next."""
    buffer_size: int = 5_000
    """Most sequences in the replay."""
    learning_starts: int = 100
    """Sequences in the replay before learning begins."""
    priority_exponent: float = 0.9
    """Power of the error that is a sequence's priority; 0 makes all alike."""
    priority_mix: float = 0.9
    """Share of a sequence's largest error in its priority; the rest is that of the mean error."""
    importance_exponent: float = 0.6
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
            at_least_one=(*counts, "recurrent", "learned"),
            fraction=(*rates, "epsilon_first", "priority_mix"),
            non_negative=("epsilon_power", "burn_in"),
        )
        items, longest = self.buffer_size, self.burn_in + self.learned
        check_option(
            "learning_starts", self.learning_starts, self.learning_starts <= items, f"1 to {items}"
        )
        check_option("period", self.period, 1 <= self.period <= longest, f"1 to {longest}")
        check_network(self.hidden_sizes, self.activation)

    @property
    def q_network(self) -> QNetwork:
        """Outputs one value for each action, after a memory."""
        env = self.task.env
        assert isinstance(env.action, Discrete)
        sizes = env.observation, env.action.n, self.hidden_sizes, self.activation
        return QNetwork(*sizes, self.dueling, recurrent=self.recurrent, network=self.network)

    def weights(self, vector: jax.Array) -> Any:
        """The network's parameters, from the vector that holds them."""
        return from_vector(vector, jax.eval_shape(self.q_network.init, jax.random.key(0)))

    def optimizer(self) -> optax.GradientTransformation:
        """Adam on clipped gradients."""
        clip = optax.clip_by_global_norm(self.max_grad_norm)
        return optax.chain(clip, optax.adam(self.learning_rate))

    def init(self, key: jax.Array) -> R2D2State:
        """New weights, the same in the target network, and an empty replay."""
        network_key, key = jax.random.split(key)
        params = to_vector(self.q_network.init(network_key))
        length = self.burn_in + self.learned + 1  # the last row shows where the last step led
        sampler = Prioritized(self.priority_exponent)
        table = Table(Sequences(length, self.period), self.buffer_size, sampler)
        first, memory = jax.ShapeDtypeStruct((), jnp.bool_), jax.eval_shape(self.initial_carry)
        example = SequenceRow(*row_shapes(self.task.env), first, memory)
        return R2D2State(
            params=params,
            target=params,
            optimizer=self.optimizer().init(params),
            replay=self.task.replay(table, example),
            key=key,
            updates=jnp.zeros((), jnp.int32),
        )

    def initial_carry(self) -> Carry:
        """An empty memory."""
        return self.q_network.initial_carry()

    def epsilon(self, timestep: Timestep) -> jax.Array:
        """The share of random actions of one environment's actor, by the environment's number."""
        count = self.task.all_envs
        return ladder(self.epsilon_first, self.epsilon_power, timestep.number, count)

    def act(
        self, params: jax.Array, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[jax.Array, R2D2Extras, Carry]:
        """ε-greedy, with the memory before the step."""
        values, after = self.q_values(params, carry, timestep)
        epsilon = self.epsilon(timestep)
        action = epsilon_greedy(key, values, epsilon)
        return action, R2D2Extras(carry, epsilon_greedy_log_prob(values, epsilon, action)), after

    def greedy(
        self, params: jax.Array, carry: Carry, timestep: Timestep
    ) -> tuple[jax.Array, Carry]:
        """The action of the highest value."""
        values, carry = self.q_values(params, carry, timestep)
        return jnp.argmax(values, axis=-1).astype(jnp.int32), carry

    def log_prob(
        self, params: jax.Array, carry: Carry, timestep: Timestep, action: jax.Array
    ) -> jax.Array:
        """The log-probability of an action."""
        values, _ = self.q_values(params, carry, timestep)
        return epsilon_greedy_log_prob(values, self.epsilon(timestep), action)

    def q_values(
        self, params: jax.Array, carry: Carry, timestep: Timestep
    ) -> tuple[jax.Array, Carry]:
        """(Q(s, ·) [actions], the memory after the observation)."""
        outputs, carry = self.q_network.step(self.weights(params), carry, timestep.observation)
        return outputs[..., 0], carry

    def rows(self, steps: Trajectory) -> tuple[SequenceRow, SequenceRow]:
        """(rows, final rows) of a trajectory, as `rl.insert` takes them."""
        row, final = rows_of(steps)
        rows = SequenceRow(*row, first=steps.first, memory=steps.extras.memory)
        return rows, SequenceRow(*final, first=None, memory=None)

    def loss(
        self, params: jax.Array, target: jax.Array, batch: ItemBatch
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        """(loss, (errors [n], metrics)) of n sequences: how far Q(s, a) is from the n-step return,
        on the scale of `rescale`. A sequence's error mixes the largest and the mean of its steps'.
        """
        rows, mask = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (batch.rows, batch.mask))
        found = self.read(self.weights(params), rows)
        following = self.read(self.weights(target), rows)
        judged = found if self.double else following
        best = chosen(following, jnp.argmax(judged[..., 0], axis=-1))[..., 0]
        rows, mask = jax.tree.map(lambda x: x[self.burn_in :], (rows, mask))
        taken = chosen(found, rows.action)[:-1, :, 0]
        # The row after a step shows where it led, unless the episode broke off and another began.
        known = mask[:-1] & ~rows.first[1:]
        cut = jnp.concatenate([~known[1:], jnp.ones_like(known[:1])])
        returns = n_step_returns(
            *(rows.reward[:-1], restore(best[1:]), rows.terminated[:-1], cut),
            *(self.gamma, self.n_step),
        )
        goals = jax.lax.stop_gradient(rescale(returns))
        errors = jnp.where(known, jnp.abs(taken - goals), 0.0)
        losses = jnp.where(known, optax.losses.huber_loss(taken, goals, delta=self.huber), 0.0)
        loss = jnp.mean(batch.weights * losses.mean(axis=0))
        mean = errors.sum(axis=0) / jnp.maximum(known.sum(axis=0), 1)
        mixed = self.priority_mix * errors.max(axis=0) + (1.0 - self.priority_mix) * mean
        return loss, (mixed, {"loss": loss, "value": jnp.mean(restore(taken))})

    def read(self, params: Any, rows: SequenceRow) -> jax.Array:
        """The outputs [1 + learned, n, …] for the rows of sequences after the burn-in."""
        memory = rows.memory[0]
        if self.burn_in:
            seen, first = jax.tree.map(lambda x: x[: self.burn_in], (rows.observation, rows.first))
            memory = self.q_network.unroll(params, memory, seen, first)[1][-1]
        seen, first = jax.tree.map(lambda x: x[self.burn_in :], (rows.observation, rows.first))
        return self.q_network.unroll(params, jax.lax.stop_gradient(memory), seen, first)[0]

    def learn(
        self, rl: RL, state: R2D2State, sample: Sample
    ) -> tuple[R2D2State, jax.Array, Metrics]:
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

    def iteration(self, rl: RL, state: R2D2State) -> tuple[R2D2State, Metrics]:
        """Actors insert their steps and memories; the learner learns from sampled sequences, and
        gives them new priorities."""
        params = rl.broadcast(state.params)
        steps = rl.unroll(self.act, params, self.unroll_length)
        replay = rl.insert(state.replay, steps, *self.rows(steps))
        key = jax.random.fold_in(state.key, state.updates)
        draws = jax.random.uniform(key, (self.gradient_steps, self.batch_size))
        replay, sample = rl.sample(replay, draws)
        state, errors, metrics = self.learn(rl, state, sample)
        priorities = new_priorities(errors, sample.keys)
        replay = rl.update_priorities(replay, sample.keys, priorities)
        return state._replace(replay=replay, updates=state.updates + 1), metrics
