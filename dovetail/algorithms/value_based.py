"""What the algorithms share that learn the values of actions from a replay.

Actors explore and insert their steps into a replay; the learner samples items from it and moves
what the network says of their first action toward their rewards and what a slowly following copy
of the network says of where they led. An algorithm says how many outputs an action has, which value
they stand for, and how far two of them are apart. What old weights did is as good as what new ones
do, so these algorithms bear any staleness.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dovetail.algorithm import RL, Algorithm, Carry, Correction, Metrics, Timestep, Trajectory
from dovetail.envs.interface import Discrete
from dovetail.errors import UserError, check_option
from dovetail.functions.bootstrapping import chosen, n_step, row
from dovetail.functions.exploration import (
    epsilon_greedy,
    epsilon_greedy_log_prob,
    ladder,
    linear,
)
from dovetail.functions.vectors import from_vector, to_vector
from dovetail.networks import layers
from dovetail.networks.q_network import QNetwork
from dovetail.replay.data import Data
from dovetail.replay.replay import Replay
from dovetail.replay.sample import Sample, importance_weights
from dovetail.replay.table import Prioritized, Table, Transitions, Uniform

LEAST_PRIORITY = 1e-6
"""What every error is more than, so that no item is lost for ever."""


class Row(NamedTuple):
    """What the replay keeps of a step."""

    observation: Any
    action: Any
    reward: Any
    terminated: Any


class Acting(NamedTuple):
    """What actors need: the network's weights and how often to act at random."""

    network: Any
    epsilon: Any


class Acted(NamedTuple):
    """What acting leaves in the trajectory beside the action; nobody but a recording reads it."""

    log_prob: jax.Array


class LearnerState(NamedTuple):
    """The learner's state."""

    params: jax.Array
    """The network's weights, as one vector."""
    target: jax.Array
    """Those that follow."""
    optimizer: Any
    replay: Replay | tuple[()]
    """What actors met; nothing where nobody acts."""
    key: jax.Array
    updates: jax.Array
    data: Data | tuple[()] = ()
    """What was recorded, if anything."""


class Batch(NamedTuple):
    """What a gradient step learns from; the first axis is that of the items."""

    rows: Any
    """[n, W, …]"""
    mask: jax.Array
    """Which rows are steps [n, W]."""
    weights: jax.Array
    """How much each item counts [n]."""


@dataclass(frozen=True)
class ValueBased(Algorithm):
    """Options, acting and learning of an algorithm that learns the values of actions."""

    actions: ClassVar[tuple[type, ...]] = (Discrete,)
    correction: ClassVar[Correction] = Correction("learning off-policy", None)

    unroll_length: int = 8
    """Steps each environment takes between two updates."""
    gradient_steps: int = 32
    """Gradient steps of an update, in one compiled call."""
    batch_size: int = 64
    """Items of a gradient step."""
    learning_rate: float = 1e-3
    """Adam's step size."""
    discount: float = 0.99
    """How much a reward one step later counts."""
    n_step: int = 1
    """Steps whose rewards are taken as they were before a value stands for the rest."""
    capacity: int = 50_000
    """The most items in the replay."""
    begin_at: int = 1_000
    """Items in the replay before anything is learned."""
    target_rate: float = 0.01
    """How far the target network moves toward the network with each gradient step."""
    double: bool = True
    """Whether the network chooses the action that the target network values,
    https://arxiv.org/abs/1509.06461."""
    dueling: bool = False
    """Whether a state's value and the actions' advantages are apart,
    https://arxiv.org/abs/1511.06581."""
    priority_exponent: float = 0.6
    """The power of the error that priorities are; 0 makes all alike."""
    importance_exponent: float = 0.4
    """How much of the bias of priorities is taken back; 1 for all."""
    huber: float = 30.0
    """Errors up to this count by their square, larger ones by their size."""
    max_grad_norm: float = 10.0
    """Gradients are scaled down to this norm."""
    hidden: tuple[int, ...] = (64, 64)
    """Sizes of the hidden layers."""
    activation: str = "relu"
    """Activation of the hidden layers: elu, gelu, relu, silu or tanh."""

    def __post_init__(self) -> None:
        self._check(("learning_rate", "huber", "max_grad_norm"), lambda x: x > 0, "more than 0")
        whole = ("unroll_length", "gradient_steps", "batch_size", "n_step", "capacity", "begin_at")
        self._check(whole, lambda x: x >= 1, "1 or more")
        self._check_shares("discount", "target_rate", "priority_exponent", "importance_exponent")
        items = self.capacity
        check_option("begin_at", self.begin_at, self.begin_at <= items, f"1 to {items}")
        check_option("hidden", self.hidden, all(n > 0 for n in self.hidden), "sizes above 0")
        layers.activation(self.activation)

    def _check(self, names: tuple[str, ...], fits: Any, wanted: str) -> None:
        for name in names:
            check_option(name, getattr(self, name), fits(getattr(self, name)), wanted)

    def _check_shares(self, *names: str) -> None:
        self._check(names, lambda x: 0 <= x <= 1, "0 to 1")

    @property
    def prioritizes(self) -> bool:
        """Whether items of larger errors are sampled more often."""
        return True

    @property
    def network(self) -> QNetwork:
        """The network for the task's spaces."""
        env = self.task.env
        assert isinstance(env.action, Discrete)
        return QNetwork(env.observation, env.action.n, self.hidden, self.activation, self.dueling)

    @property
    def table(self) -> Table:
        """The replay's options."""
        return Table(Transitions(self.n_step), self.capacity, self.sampler)

    @property
    def sampler(self) -> Prioritized | Uniform:
        """How items are chosen."""
        return Prioritized(self.priority_exponent) if self.prioritizes else Uniform()

    def example(self) -> Any:
        """The shapes of a row."""
        return Row(
            observation=self.task.env.observation,
            action=jax.ShapeDtypeStruct((), jnp.int32),
            reward=jax.ShapeDtypeStruct((), jnp.float32),
            terminated=jax.ShapeDtypeStruct((), jnp.bool_),
        )

    def rows(self, steps: Trajectory) -> tuple[Any, Any]:
        """(rows, what was seen after each) of a trajectory."""
        rows = Row(steps.observation, steps.action, steps.reward, steps.terminated)
        return rows, Row(steps.next_observation, None, None, None)

    def init(self, key: jax.Array) -> LearnerState:
        """New weights, a fresh optimizer, an empty replay."""
        network_key, key = jax.random.split(key)
        params = to_vector(self.network.init(network_key))
        return LearnerState(
            params=params,
            target=params,
            optimizer=self.optimizer().init(params),
            replay=self.task.replay(self.table, self.example()) if self.task.online else (),
            key=key,
            updates=jnp.zeros((), jnp.int32),
            data=self.task.recorded(self.example(), self.n_step),
        )

    @property
    def offline_steps(self) -> int:
        """Gradient steps of an update."""
        return self.gradient_steps

    @property
    def recorded_window(self) -> int:
        """Steps of an item."""
        return self.n_step

    @property
    def recorded_draws_each(self) -> int:
        """Recorded items of an update."""
        return self.gradient_steps * self.recorded_items

    @property
    def recorded_items(self) -> int:
        """Of the items of a batch, those that are recorded."""
        return 0

    def recorded_row(self, rows: Any) -> Row:
        """What is kept of recorded rows."""
        return Row(rows.observation, rows.action, rows.reward, rows.terminated)

    def optimizer(self) -> optax.GradientTransformation:
        """Adam with clipped gradients."""
        clip = optax.clip_by_global_norm(self.max_grad_norm)
        return optax.chain(clip, optax.adam(self.learning_rate))

    def acting(self, state: LearnerState) -> Acting:
        """The weights, and how often to explore."""
        return Acting(state.params, self.exploration(state))

    def exploration(self, state: LearnerState) -> Any:
        """What actors need to know of how often to act at random."""
        raise NotImplementedError(f"{type(self).__name__} does not define exploration(state).")

    def epsilon(self, params: Acting, timestep: Timestep) -> jax.Array:
        """The share of random actions of one environment's actor."""
        return params.epsilon

    def values(self, outputs: jax.Array) -> jax.Array:
        """The values [..., actions] that the network's outputs stand for."""
        return outputs[..., 0]

    def act(
        self, params: Acting, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[jax.Array, Any, Carry]:
        """Epsilon-greedy."""
        values, epsilon = self._now(params, timestep), self.epsilon(params, timestep)
        action = epsilon_greedy(key, values, epsilon)
        return action, Acted(epsilon_greedy_log_prob(values, epsilon, action)), carry

    def log_prob(
        self, params: Acting, carry: Carry, timestep: Timestep, action: jax.Array
    ) -> jax.Array:
        """By the share of random actions."""
        values, epsilon = self._now(params, timestep), self.epsilon(params, timestep)
        return epsilon_greedy_log_prob(values, epsilon, action)

    def greedy(self, params: Acting, carry: Carry, timestep: Timestep) -> tuple[jax.Array, Carry]:
        """The action of the highest value."""
        return jnp.argmax(self._now(params, timestep), axis=-1).astype(jnp.int32), carry

    def _now(self, params: Acting, timestep: Timestep) -> jax.Array:
        """What actions are worth."""
        return self.values(self.network.apply(self.weights(params.network), timestep.observation))

    def iteration(self, rl: RL, state: LearnerState) -> tuple[LearnerState, Metrics]:
        """Actors insert what they did; the learner learns from samples of what is there, and of
        what was recorded."""
        replay = state.replay
        if isinstance(replay, Replay):  # somebody acts
            params = rl.broadcast(self.acting(state))
            steps = rl.unroll(self.act, params, self.unroll_length)
            rows, final = self.rows(steps)
            replay = rl.insert(replay, steps, rows, final)
        return self.replayed(rl, state, replay)

    def replayed(
        self, rl: RL, state: LearnerState, replay: Replay | tuple[()]
    ) -> tuple[LearnerState, Metrics]:
        """An update from samples of the replay, which learns how wrong the network was on them, and
        of what was recorded."""
        key = jax.random.fold_in(state.key, state.updates)
        recorded, enough = self.recorded_items, jnp.ones((), jnp.bool_)
        samples: list[Sample] = []
        if isinstance(replay, Replay):
            draws = jax.random.uniform(key, (self.gradient_steps, self.batch_size - recorded))
            replay, sample = rl.sample(replay, draws)
            enough = jnp.min(sample.size) >= self.begin_at
            samples.append(sample)
        if isinstance(state.data, Data):
            shape = self.gradient_steps, recorded
            bits = jax.random.bits(jax.random.fold_in(key, 2), shape, jnp.uint32)
            samples.append(rl.recall(state.data, bits))
        batches = _joined([self.batches(rl, sample) for sample in samples])
        data = state.data
        state, errors, metrics = self.learn(rl, state, batches, enough, key)
        if self.prioritizes and isinstance(replay, Replay):
            keys = samples[0].keys
            errors = errors[:, : keys.slot.shape[1]]
            replay = rl.update_priorities(replay, keys, errors + LEAST_PRIORITY)
        return state._replace(replay=replay, data=data, updates=state.updates + 1), metrics

    def batches(self, rl: RL, sample: Sample) -> Batch:
        """What a sample [K, n, …] says."""
        weights = jnp.asarray(sample.mask[:, :, 0], jnp.float32)  # what was broken off has no step
        if self.prioritizes:
            weights *= importance_weights(
                sample.probabilities, sample.size, self.importance_exponent, rl.max
            )
        return Batch(sample.rows, jnp.asarray(sample.mask), weights)

    def learn(
        self, rl: RL, state: LearnerState, batches: Batch, enough: jax.Array, key: jax.Array
    ) -> tuple[LearnerState, jax.Array, Metrics]:
        """(state, errors, metrics): a gradient step on each of some batches [K, n, …], if there is
        enough to learn from."""

        def step(old: tuple[Any, Any, Any], part: Any) -> tuple[tuple[Any, Any, Any], Any]:
            params, target, optimizer = old
            gradients, found = jax.grad(self._loss, has_aux=True)(params, target, *part)
            updates, optimizer = self.optimizer().update(rl.mean(gradients), optimizer, params)
            params = optax.apply_updates(params, updates)
            target = optax.incremental_update(params, target, self.target_rate)
            new = params, target, optimizer
            return jax.tree.map(lambda a, b: jnp.where(enough, a, b), new, old), found

        old = state.params, state.target, state.optimizer
        new, (errors, metrics) = jax.lax.scan(step, old, (batches, self.noise(key)))
        params, target, optimizer = new
        means = {name: jnp.where(enough, jnp.mean(x), 0.0) for name, x in metrics.items()}
        state = state._replace(params=params, target=target, optimizer=optimizer)
        return state, errors, means

    def weights(self, params: jax.Array) -> Any:
        """The network's weights: the learner keeps them as one vector."""
        return from_vector(params, jax.eval_shape(self.network.init, jax.random.key(0)))

    def noise(self, key: jax.Array) -> Any:
        """Noise [gradient steps, 3, n] of the networks of each loss; None unless they are noisy."""
        return None

    def _loss(
        self, params: jax.Array, target: jax.Array, batch: Batch, noise: Any
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        return self.loss(self.weights(params), self.weights(target), batch, noise)

    def loss(
        self, params: Any, target: Any, batch: Batch, noise: Any
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        """(loss, (errors, metrics)) of a batch of transitions."""
        now, later, judge = (None, None, None) if noise is None else noise
        rows, network = batch.rows, self.network
        steps = n_step(rows.reward, rows.terminated, batch.mask, self.discount)
        after = row(rows.observation, steps.last)
        following = network.apply(target, after, later)
        judged = network.apply(params, after, judge) if self.double else following
        best = jnp.argmax(self.values(judged), axis=-1)
        first = jax.tree.map(lambda x: x[:, 0], rows.observation)
        taken = chosen(network.apply(params, first, now), rows.action[:, 0])
        losses, errors = self.compare(
            taken, steps.reward, steps.discount, jax.lax.stop_gradient(chosen(following, best))
        )
        loss = jnp.mean(batch.weights * losses)
        return loss, (errors, {"loss": loss, "value": jnp.mean(self.values(taken))})

    def compare(
        self, taken: jax.Array, reward: jax.Array, discount: jax.Array, following: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """(losses, errors) [n] of what was said of the actions taken [n, outputs], where they
        brought `reward` and led to what is said of as `following`: here Huber's loss of values."""
        goal = reward + discount * following[:, 0]
        found = taken[:, 0]
        return optax.losses.huber_loss(found, goal, delta=self.huber), jnp.abs(found - goal)


def _joined(batches: list[Batch]) -> Batch:
    """The items of several batches [K, n, …] as those of one."""
    if len(batches) == 1:
        return batches[0]
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *batches)


@dataclass(frozen=True)
class Annealed(ValueBased):
    """Actors that explore alike, and less and less."""

    takes_data: ClassVar[bool] = True

    epsilon_start: float = 1.0
    """The share of random actions at the start; with recorded data it is `epsilon_end` at once."""
    epsilon_end: float = 0.05
    """The share of random actions in the end."""
    epsilon_share: float = 0.2
    """The share of the run after which it is `epsilon_end`."""
    noisy: bool = False
    """Whether random weights explore in place of random actions, https://arxiv.org/abs/1706.10295."""
    prioritized: bool = False
    """Whether items of larger errors are sampled more often, https://arxiv.org/abs/1511.05952."""
    data_share: float = 0.5
    """The share of recorded items in a batch, where there are replayed ones as well."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_shares("epsilon_start", "epsilon_end", "epsilon_share")
        self._check(("data_share",), lambda x: 0 < x < 1, "more than 0 and less than 1")

    @property
    def recorded_items(self) -> int:
        """Of the items of a batch, those that are recorded."""
        if self.task.data is None:
            return 0
        if not self.task.online:
            return self.batch_size
        return min(max(round(self.data_share * self.batch_size), 1), self.batch_size - 1)

    @property
    def prioritizes(self) -> bool:
        """Whether items of larger errors are sampled more often."""
        return self.prioritized

    def exploration(self, state: LearnerState) -> jax.Array:
        """The share of random actions by now; none where the weights are random."""
        if self.noisy:
            return jnp.zeros(())
        # what there is to know at first need not be found by luck where it was recorded
        start = self.epsilon_start if self.task.data is None else self.epsilon_end
        steps = state.updates * (self.unroll_length * self.task.num_envs)
        over = self.epsilon_share * self.task.steps
        return linear(start, self.epsilon_end, over, steps)

    def act(
        self, params: Acting, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[jax.Array, Any, Carry]:
        """Epsilon-greedy, or greedy by a network whose weights deviate."""
        if not self.noisy:
            return super().act(params, carry, timestep, key)
        noise = jax.random.normal(key, (self.network.noise,))
        values = self.values(
            self.network.apply(self.weights(params.network), timestep.observation, noise)
        )
        return jnp.argmax(values, axis=-1).astype(jnp.int32), (), carry

    def log_prob(
        self, params: Acting, carry: Carry, timestep: Timestep, action: jax.Array
    ) -> jax.Array:
        """By the share of random actions; of weights that deviate it is not known."""
        if self.noisy:
            raise UserError(
                f"{type(self).__name__} with noisy weights does not say how probable its actions "
                "are: judge it as greedy."
            )
        return super().log_prob(params, carry, timestep, action)

    def noise(self, key: jax.Array) -> Any:
        """Noise [gradient steps, 3, n] of the networks of each loss; None unless they are noisy."""
        if not self.noisy:
            return None
        count = self.network.noise
        return jax.random.normal(jax.random.fold_in(key, 1), (self.gradient_steps, 3, count))


@dataclass(frozen=True)
class Laddered(ValueBased):
    """Many actors, of which some explore much and others hardly at all."""

    epsilon_first: float = 0.4
    """The share of random actions of the actor that explores most."""
    epsilon_power: float = 7.0
    """The last actor's is `epsilon_first` to the power of one more than this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_shares("epsilon_first")
        self._check(("epsilon_power",), lambda x: x >= 0, "0 or more")

    def exploration(self, state: LearnerState) -> Any:
        """Nothing: it does not change as the run goes on."""
        return ()

    def epsilon(self, params: Acting, timestep: Timestep) -> jax.Array:
        """The share of random actions of one environment's actor, by its number."""
        count = self.task.all_envs
        return ladder(self.epsilon_first, self.epsilon_power, timestep.number, count)
