"""What the off-policy actor-critics share: a replay, and a loop of gradient steps on its samples.

Actors insert their steps into a replay; the learner takes a number of gradient steps, in one
compiled call, on transitions sampled from it. Where transitions come from is told apart from what
is learned from them: `learn` takes a `Batch`, whoever made it. So they may be recorded ones, alone
or beside the replay's. Continuous actions are in [-1, 1]; the environment's adapter maps these to
its bounds.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dovetail.algorithm import RL, Algorithm, Correction, Metrics, Task, Trajectory
from dovetail.envs.interface import Continuous, Discrete
from dovetail.errors import UserError, check_option
from dovetail.functions.bootstrapping import n_step, row
from dovetail.functions.normalization import (
    Moments,
    batch_sums,
    initial_moments,
    normalize,
    update,
)
from dovetail.networks import layers
from dovetail.replay.data import Data
from dovetail.replay.replay import Replay
from dovetail.replay.sample import Sample, importance_weights
from dovetail.replay.table import Prioritized, Table, Transitions, Uniform

KEYS = 5
"""Random keys of a gradient step. They are made for all steps of an update at once: a key that is
made of a key inside the loop would be made again wherever it is used."""

OFFLINE_STEPS = 20
"""Gradient steps of an update unless told, where there are no environment steps to count."""

TOGETHER = 4
"""The most gradient steps that are compiled one after another: more would compile for long."""

INSIDE = 1 - 1e-5
"""Recorded actions are clipped to this: a squashed distribution has no density on the bounds."""


class Row(NamedTuple):
    """What the replay keeps of a step."""

    observation: Any
    action: Any
    reward: Any
    terminated: Any


class Batch(NamedTuple):
    """Transitions to learn from, [n, …]."""

    observation: Any
    action: jax.Array
    reward: jax.Array
    """The discounted sum of the rewards until `following`."""
    discount: jax.Array
    """How much the value of `following` counts: 0 where the episode terminated."""
    following: Any
    """The observation to which they led."""
    weights: jax.Array
    """How much each counts."""
    goal: jax.Array | tuple[()] = ()
    """What the critics should say, where that is known before the gradient step."""


class Acting(NamedTuple):
    """What actors need."""

    network: Any
    moments: Moments
    warming: jax.Array
    """Whether actions are still random, because nothing is learned yet."""


class Acted(NamedTuple):
    """What acting leaves in the trajectory beside the action; nobody but a recording reads it."""

    log_prob: jax.Array


class LearnerState(NamedTuple):
    """The learner's state."""

    params: dict[str, Any]
    """Of each part: "actor", "critics", …"""
    target: dict[str, Any]
    """Slowly following copies of some of them."""
    optimizer: dict[str, Any]
    """Of each part."""
    moments: Moments
    """Of the observations that actors met."""
    replay: Replay | tuple[()]
    """What actors met; nothing where nobody acts."""
    key: jax.Array
    steps: jax.Array
    """Gradient steps so far; in a rhythm compiled together, which of its steps: a plain number."""
    updates: jax.Array
    data: Data | tuple[()] = ()
    """What was recorded, if anything."""


@dataclass(frozen=True)
class OffPolicyAlgorithm(Algorithm):
    """Options, replay and learning loop of an algorithm that learns from replayed transitions."""

    correction: ClassVar[Correction] = Correction("learning off-policy", None)
    takes_data: ClassVar[bool] = True

    unroll_length: int = 1
    """Steps each environment takes between two updates."""
    gradient_steps: int = 0
    """Gradient steps of an update, in one compiled call; 0 for as many as its environment steps, or
    20 where nobody acts."""
    batch_size: int = 256
    """Transitions of a gradient step."""
    learning_rate: float = 1e-3
    """Adam's step size."""
    discount: float = 0.99
    """How much a reward one step later counts."""
    n_step: int = 1
    """Steps whose rewards are taken as they were before a value stands for the rest."""
    capacity: int = 200_000
    """The most transitions in the replay."""
    begin_at: int = 1_000
    """Transitions in the replay before anything is learned; until then actions are random."""
    target_rate: float = 0.005
    """How far the target networks move toward the networks with each gradient step."""
    prioritized: bool = False
    """Whether transitions of larger errors are sampled more often,
    https://arxiv.org/abs/1511.05952."""
    priority_exponent: float = 0.6
    """The power of the error that priorities are; 0 makes all alike."""
    importance_exponent: float = 0.4
    """How much of the bias of priorities is taken back; 1 for all."""
    normalize_observations: bool = False
    """Whether observations are shifted and scaled by their running moments."""
    hidden: tuple[int, ...] = (256, 256)
    """Sizes of the hidden layers."""
    activation: str = "relu"
    """Activation of the hidden layers: elu, gelu, relu, silu or tanh."""
    data_share: float = 0.5
    """The share of recorded transitions in a batch, where there are replayed ones as well."""

    def __post_init__(self) -> None:
        check_option("learning_rate", self.learning_rate, self.learning_rate > 0, "more than 0")
        for name in ("unroll_length", "batch_size", "n_step", "capacity", "begin_at"):
            check_option(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        check_option("gradient_steps", self.gradient_steps, self.gradient_steps >= 0, "0 or more")
        for name in ("discount", "target_rate", "priority_exponent", "importance_exponent"):
            check_option(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "0 to 1")
        items = self.capacity
        check_option("begin_at", self.begin_at, self.begin_at <= items, f"1 to {items}")
        fits = 0 < self.data_share < 1
        check_option("data_share", self.data_share, fits, "more than 0 and less than 1")
        check_option("hidden", self.hidden, all(n > 0 for n in self.hidden), "sizes above 0")
        layers.activation(self.activation)

    def bind(self, task: Task) -> Self:
        """The same options with a task; refused where actions have no bounds to explore within."""
        bound, action = super().bind(task), task.env.action
        if isinstance(action, Continuous) and not action.bounded:
            raise UserError(
                f"{type(self).__name__} explores within the bounds of actions, but {task.env.id} "
                f"takes {action}: bound every entry in a wrapper, or choose ppo."
            )
        return bound

    @property
    def steps_per_update(self) -> int:
        """Gradient steps of an update."""
        if not self.task.online:
            return self.gradient_steps or OFFLINE_STEPS
        return self.gradient_steps or self.unroll_length * self.task.num_envs

    @property
    def rhythm(self) -> int:
        """After how many gradient steps the parts that move in a step recur."""
        return 1

    @property
    def offline_steps(self) -> int:
        """Gradient steps of an update."""
        return self.steps_per_update

    @property
    def recorded_window(self) -> int:
        """Steps of a transition."""
        return self.n_step

    @property
    def recorded_draws_each(self) -> int:
        """Recorded transitions of an update."""
        return self.steps_per_update * self.recorded_items

    @property
    def recorded_items(self) -> int:
        """Of the transitions of a batch, those that are recorded."""
        if self.task.data is None:
            return 0
        if not self.task.online:
            return self.batch_size
        return min(max(round(self.data_share * self.batch_size), 1), self.batch_size - 1)

    @property
    def table(self) -> Table:
        """The replay's options."""
        sampler = Prioritized(self.priority_exponent) if self.prioritized else Uniform()
        return Table(Transitions(self.n_step), self.capacity, sampler)

    def networks(self, key: jax.Array) -> dict[str, Any]:
        """New parameters of each part; each algorithm has its own."""
        raise NotImplementedError(f"{type(self).__name__} does not define networks(key).")

    followed: ClassVar[tuple[str, ...]] = ("critics",)
    """The parts of which there are target networks."""

    def init(self, key: jax.Array) -> LearnerState:
        """New weights, fresh optimizers, an empty replay."""
        network_key, key = jax.random.split(key)
        params, spec = self.networks(network_key), self.task.env
        continuous = isinstance(spec.action, Continuous)
        shape = (spec.action.size,) if isinstance(spec.action, Continuous) else ()
        example = Row(
            observation=spec.observation,
            action=jax.ShapeDtypeStruct(shape, jnp.float32 if continuous else jnp.int32),
            reward=jax.ShapeDtypeStruct((), jnp.float32),
            terminated=jax.ShapeDtypeStruct((), jnp.bool_),
        )
        return LearnerState(
            params=params,
            target={part: params[part] for part in self.followed},
            optimizer={part: self.optimizer().init(params[part]) for part in params},
            moments=initial_moments(spec.observation),
            replay=self.task.replay(self.table, example) if self.task.online else (),
            key=key,
            steps=jnp.zeros((), jnp.int32),
            updates=jnp.zeros((), jnp.int32),
            data=self.task.recorded(example, self.n_step),
        )

    def recorded_row(self, rows: Any) -> Row:
        """What is kept of recorded rows; what is beyond the bounds of actions is clipped."""
        action = rows.action
        if isinstance(self.task.env.action, Continuous):
            action = np.clip(action, -INSIDE, INSIDE)
        return Row(rows.observation, action, rows.reward, rows.terminated)

    def optimizer(self) -> optax.GradientTransformation:
        """Adam, one for each part."""
        return optax.adam(self.learning_rate)

    def acting(self, state: LearnerState) -> Acting:
        """The policy's weights, and whether to act at random still: until the first gradient step,
        and never if the policy needs recorded data."""
        first = 0 if self.needs_data else 1
        return Acting(state.params["actor"], state.moments, state.steps < first)

    def random_action(self, key: jax.Array) -> jax.Array:
        """Any action."""
        match self.task.env.action:
            case Continuous(size=size):
                return jax.random.uniform(key, (size,), minval=-1.0, maxval=1.0)
            case Discrete(n=n):
                return jax.random.randint(key, (), 0, n, jnp.int32)
            case other:
                raise NotImplementedError(f"{type(self).__name__} has no random action of {other}.")

    def acted(
        self, params: Acting, key: jax.Array, action: jax.Array, log_prob: jax.Array
    ) -> tuple[jax.Array, Acted]:
        """The policy's action, any action at first; and how probable it was."""
        chosen = jnp.where(params.warming, self.random_action(key), action)
        return chosen, Acted(self.acted_log_prob(params, log_prob))

    def acted_log_prob(self, params: Acting, log_prob: jax.Array) -> jax.Array:
        """The policy's log-probability, that of any action at first."""
        match self.task.env.action:
            case Continuous(size=size):
                evenly = -size * math.log(2)
            case Discrete(n=n):
                evenly = -math.log(n)
            case other:
                raise NotImplementedError(f"{type(self).__name__} has no random action of {other}.")
        return jnp.where(params.warming, evenly, log_prob)

    def iteration(self, rl: RL, state: LearnerState) -> tuple[LearnerState, Metrics]:
        """Actors insert what they did; the learner learns from samples of what is there, and of
        what was recorded."""
        samples: list[Sample] = []
        replay, data, enough = state.replay, state.data, jnp.ones((), jnp.bool_)
        if isinstance(replay, Replay):  # somebody acts
            acting = rl.broadcast(self.acting(state))
            steps = rl.unroll(self.act, acting, self.unroll_length)
            rows = Row(steps.observation, steps.action, steps.reward, steps.terminated)
            final = Row(steps.next_observation, None, None, None)
            replay = rl.insert(replay, steps, rows, final)
            replay, sample = rl.sample(replay, self.draws(state))
            state = state._replace(moments=self.seen(rl, state.moments, steps))
            enough = jnp.min(sample.size) >= self.begin_at
            samples.append(sample)
        if isinstance(data, Data):
            samples.append(rl.recall(data, self.recorded_draws(state)))
            if not self.task.online:
                state = state._replace(moments=self.recalled(rl, state.moments, samples[0]))
        batches = _joined([jax.vmap(lambda x: self.batch(rl, state, x))(part) for part in samples])
        state, errors, metrics = self.learn(rl, state, batches, enough)
        if self.prioritized and isinstance(replay, Replay):
            keys = samples[0].keys
            errors = errors[:, : keys.slot.shape[1]]
            replay = rl.update_priorities(replay, keys, errors + 1e-6)
        return state._replace(replay=replay, data=data, updates=state.updates + 1), metrics

    def draws(self, state: LearnerState) -> jax.Array:
        """What the replay chooses the transitions of an update by."""
        key = jax.random.fold_in(state.key, 2 * state.updates)
        items = self.batch_size - self.recorded_items
        return jax.random.uniform(key, (self.steps_per_update, items))

    def recorded_draws(self, state: LearnerState) -> jax.Array:
        """What the recorded transitions of an update are chosen by."""
        key = jax.random.fold_in(jax.random.fold_in(state.key, 2 * state.updates), 1)
        return jax.random.bits(key, (self.steps_per_update, self.recorded_items), jnp.uint32)

    def seen(self, rl: RL, moments: Moments, steps: Trajectory) -> Moments:
        """The observations' moments with those of an unroll; gathered only where they are used."""
        if not self.normalize_observations:
            return moments
        observation, valid = rl.gather((steps.observation, steps.valid))
        sums = batch_sums(moments, observation, valid.astype(jnp.float32))
        return update(moments, rl.mean(sums))

    def recalled(self, rl: RL, moments: Moments, sample: Sample) -> Moments:
        """The observations' moments with those of recorded ones, where nobody acts."""
        if not self.normalize_observations:
            return moments
        observation = jax.tree.map(lambda x: x[:, :, 0], sample.rows.observation)
        shape = sample.mask.shape[:2]
        whole = jnp.full(shape, self.recorded_items / shape[1])  # a replica has a part of a batch
        sums = batch_sums(moments, observation, whole)
        return update(moments, rl.mean(sums))

    def normalized(self, moments: Moments, observation: Any) -> Any:
        """What networks are shown."""
        return normalize(moments, observation) if self.normalize_observations else observation

    def batch(self, rl: RL, state: LearnerState, sample: Sample) -> Batch:
        """What a sample of the replay says, with the observations as networks are shown them."""
        rows, mask = sample.rows, jnp.asarray(sample.mask)
        steps = n_step(rows.reward, rows.terminated, mask, self.discount)
        weights = mask[:, 0].astype(jnp.float32)  # what was broken off has no step
        if self.prioritized:
            weights *= importance_weights(
                sample.probabilities, sample.size, self.importance_exponent, rl.max
            )
        return Batch(
            observation=self.normalized(
                state.moments, jax.tree.map(lambda x: x[:, 0], rows.observation)
            ),
            action=rows.action[:, 0],
            reward=steps.reward,
            discount=steps.discount,
            following=self.normalized(state.moments, row(rows.observation, steps.last)),
            weights=weights,
        )

    def learn(
        self, rl: RL, state: LearnerState, batches: Batch, enough: jax.Array
    ) -> tuple[LearnerState, jax.Array, Metrics]:
        """(state, errors, metrics): a gradient step on each of some batches [K, n, …], if there is
        enough to learn from. The errors are those of their transitions, the metrics averages."""
        count = self.steps_per_update
        key = jax.random.fold_in(state.key, 2 * state.updates + 1)
        items = batches.weights.shape[1]
        keys = _made(rl.own_keys(jax.random.split(key, (count, KEYS)), items))
        kept = state._replace(replay=(), data=(), key=())  # type: ignore[arg-type]
        fits = self.rhythm <= TOGETHER and count % self.rhythm == 0
        rhythm = self.rhythm if fits else 1

        @jax.jit(inline=True)  # traced once, for shapes and loop
        def steps(i: jax.Array, state: LearnerState) -> Any:
            """(state, errors [rhythm, n], sums of metrics) after the i-th pass of steps."""
            part = lambda x: jax.lax.dynamic_slice_in_dim(x, rhythm * i, rhythm)  # noqa: E731
            own = part(keys)
            taken = self.prepared(state, jax.tree.map(part, batches), own)
            done = []
            for j in range(rhythm):
                batch = jax.tree.map(lambda x, j=j: x[j], taken)
                at = state if rhythm == 1 else state._replace(steps=j)  # type: ignore[arg-type]
                after, *found = self.gradient_step(rl, at, batch, own[j])
                state = after._replace(steps=state.steps + 1)
                done.append(found)
            errors, metrics = zip(*done, strict=True)
            return state, jnp.stack(errors), jax.tree.map(lambda *x: sum(x), *metrics)

        def body(i: jax.Array, loop: Any) -> Any:
            state, errors, sums = loop
            state, found, metrics = steps(jnp.asarray(i, jnp.int32), state)
            errors = jax.lax.dynamic_update_slice_in_dim(errors, found, rhythm * i, axis=0)
            return state, errors, jax.tree.map(jnp.add, sums, metrics)

        shapes = jax.eval_shape(lambda: steps(jnp.int32(0), kept))
        errors = jnp.zeros((count, *shapes[1].shape[1:]))
        sums = {name: jnp.zeros(()) for name in shapes[2]}
        # no pass at all before there is enough: cheaper than to choose between old and new weights
        passes = jnp.where(enough, count // rhythm, 0)
        kept, errors, sums = jax.lax.fori_loop(0, passes, body, (kept, errors, sums))
        metrics = {name: total / count for name, total in sums.items()}
        return kept._replace(key=state.key), errors, metrics

    def prepared(self, state: LearnerState, batches: Batch, keys: jax.Array) -> Batch:
        """The batches [k, n, …] of the gradient steps of one rhythm, which have keys [k, `KEYS`],
        with whatever can be told before the first of them and stays so until the last."""
        return batches

    def gradient_step(
        self, rl: RL, state: LearnerState, batch: Batch, keys: jax.Array
    ) -> tuple[LearnerState, jax.Array, Metrics]:
        """(state, errors [n], metrics) after one gradient step on a batch that was prepared, with
        `KEYS` keys of its own; each algorithm has its own."""
        raise NotImplementedError(f"{type(self).__name__} does not define gradient_step(…).")

    def at_times(
        self, improve: Callable[[LearnerState], tuple[LearnerState, Metrics]], state: LearnerState
    ) -> tuple[LearnerState, Metrics]:
        """`improve(state)` in the last gradient step of each rhythm, else the state; the metrics
        are such that their average over all steps is that of the steps in which it was done."""
        count = self.rhythm
        if count == 1:
            return improve(state)

        @jax.jit(inline=True)  # traced once, for shapes and loop
        def rarely(state: LearnerState) -> tuple[LearnerState, Metrics]:
            state, metrics = improve(state)
            return state, {name: count * x for name, x in metrics.items()}

        nothing = {name: jnp.zeros(()) for name in jax.eval_shape(rarely, state)[1]}
        due: Any = (state.steps + 1) % count == 0
        if isinstance(due, bool):
            return rarely(state) if due else (state, nothing)
        # a loop that passes once or not at all: unlike a choice, it copies nothing that stays
        return jax.lax.fori_loop(
            0, due.astype(jnp.int32), lambda _, x: rarely(x[0]), (state, nothing)
        )

    def descend(self, rl: RL, state: LearnerState, gradients: dict[str, Any]) -> LearnerState:
        """The state after a step of some parts along their gradients."""
        params, optimizer = dict(state.params), dict(state.optimizer)
        for part, gradient in rl.mean(gradients).items():
            change, optimizer[part] = self.optimizer().update(gradient, optimizer[part])
            params[part] = optax.apply_updates(params[part], change)
        return state._replace(params=params, optimizer=optimizer)

    def follow(self, state: LearnerState) -> LearnerState:
        """The state with the target networks moved toward the networks."""
        params = {part: state.params[part] for part in self.followed}
        return state._replace(
            target=optax.incremental_update(params, state.target, self.target_rate)
        )


def _joined(batches: list[Batch]) -> Batch:
    """The transitions of several batches [K, n, …] as those of one."""
    if len(batches) == 1:
        return batches[0]
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *batches)


def _made(keys: jax.Array) -> jax.Array:
    """The keys as they are; whatever uses them waits until they are made."""
    words = jax.lax.optimization_barrier(jax.random.key_data(keys))
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(keys))
