"""Batches of an update, drawn from a replay, from recorded data, or from both.

An update draws K batches of n transitions at once, [K, n, …], one for each of its gradient steps.
What is learned from a batch does not depend on where its transitions came from.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from dovetail.algorithm import RL, Task, Trajectory
from dovetail.blocks.learner_state import LearnerState
from dovetail.blocks.options import check_network, check_options
from dovetail.blocks.replayed import Batch, example_row, joined, transitions
from dovetail.errors import check_option
from dovetail.functions.normalization import (
    Moments,
    batch_sums,
    initial_moments,
    normalize,
    update,
)
from dovetail.replay.sample import Sample, importance_weights
from dovetail.replay.table import Prioritized, Table, Transitions, Uniform

OFFLINE_STEPS = 20
"""Default number of gradient steps of an update without environment steps to count."""


class ReplayOptions(Protocol):
    """An algorithm's options of replay and batches; each algorithm's file says what they mean."""

    @property
    def task(self) -> Task: ...
    @property
    def unroll_length(self) -> int: ...
    @property
    def gradient_steps(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def gamma(self) -> float: ...
    @property
    def n_step(self) -> int: ...
    @property
    def buffer_size(self) -> int: ...
    @property
    def learning_starts(self) -> int: ...
    @property
    def prioritized(self) -> bool: ...
    @property
    def priority_exponent(self) -> float: ...
    @property
    def importance_exponent(self) -> float: ...
    @property
    def data_share(self) -> float: ...
    @property
    def normalize_observations(self) -> bool: ...
    @property
    def hidden_sizes(self) -> tuple[int, ...]: ...
    @property
    def activation(self) -> str: ...


def check_replay_options(options: ReplayOptions) -> None:
    """Refuses options out of their range: those above, `learning_rate` and `tau`."""
    check_options(
        options,
        positive=("learning_rate",),
        non_negative=("gradient_steps",),
        at_least_one=("unroll_length", "batch_size", "n_step", "buffer_size", "learning_starts"),
        fraction=("gamma", "tau", "priority_exponent", "importance_exponent"),
        inner_fraction=("data_share",),
    )
    starts, size = options.learning_starts, options.buffer_size
    check_option("learning_starts", starts, starts <= size, f"1 to {size}")
    check_network(options.hidden_sizes, options.activation)


@dataclass(frozen=True)
class Sampling:
    """Draws the batches of an update as an algorithm's options say."""

    options: ReplayOptions

    @property
    def steps(self) -> int:
        """Gradient steps K of an update."""
        options = self.options
        if not options.task.online:
            return options.gradient_steps or OFFLINE_STEPS
        return options.gradient_steps or options.unroll_length * options.task.num_envs

    @property
    def recorded(self) -> int:
        """Recorded transitions of a batch."""
        task, size = self.options.task, self.options.batch_size
        if task.data is None:
            return 0
        if not task.online:
            return size
        # Both sources contribute at least one transition, whatever is rounded.
        return min(max(round(self.options.data_share * size), 1), size - 1)

    @property
    def table(self) -> Table:
        """The replay's options."""
        options = self.options
        sampler = Prioritized(options.priority_exponent) if options.prioritized else Uniform()
        return Table(Transitions(options.n_step), options.buffer_size, sampler)

    def draws(self, state: LearnerState) -> jax.Array:
        """Uniform numbers [K, n] for `rl.sample`."""
        # Even numbers draw batches; odd ones are the gradient steps' (`gradient_keys`).
        key = jax.random.fold_in(state.key, 2 * state.updates)
        return jax.random.uniform(key, (self.steps, self.options.batch_size - self.recorded))

    def recorded_draws(self, state: LearnerState) -> jax.Array:
        """Random integers [K, n] for `rl.recall`."""
        key = jax.random.fold_in(jax.random.fold_in(state.key, 2 * state.updates), 1)
        return jax.random.bits(key, (self.steps, self.recorded), jnp.uint32)

    def enough(self, replayed: Sample | None) -> jax.Array:
        """Whether the replay holds enough transitions to learn from; recorded data always do."""
        if replayed is None:
            return jnp.ones((), jnp.bool_)
        return jnp.min(replayed.size) >= self.options.learning_starts

    def normalized(self, moments: Moments, observation: Any) -> Any:
        """Observations as networks see them."""
        if not self.options.normalize_observations:
            return observation
        return normalize(moments, observation)

    def moments(
        self, rl: RL, moments: Moments, steps: Trajectory | None, recorded: Sample | None
    ) -> Moments:
        """Running moments updated with the observations of an unroll, or of recorded transitions
        if nobody acts. Observations are gathered only if they are normalized."""
        if not self.options.normalize_observations:
            return moments
        if steps is not None:
            observation, valid = rl.gather((steps.observation, steps.valid))
            weights = valid.astype(jnp.float32)
        else:
            assert recorded is not None
            observation = jax.tree.map(lambda x: x[:, :, 0], recorded.rows.observation)
            shape = recorded.mask.shape[:2]
            weights = jnp.full(shape, self.recorded / shape[1])  # a replica has part of a batch
        return update(moments, rl.mean(batch_sums(moments, observation, weights)))

    def batches(
        self, rl: RL, moments: Moments, replayed: Sample | None, recorded: Sample | None
    ) -> Batch:
        """Transitions [K, n, …] of samples [K, n, W, …]: replayed ones first, then recorded."""
        samples = [sample for sample in (replayed, recorded) if sample is not None]
        return joined([jax.vmap(lambda x: self.batch(rl, moments, x))(part) for part in samples])

    def batch(self, rl: RL, moments: Moments, sample: Sample) -> Batch:
        """Transitions [n, …] of a sample [n, W, …], normalized and weighted."""
        batch = transitions(sample, self.options.gamma)
        weights = batch.weights
        if self.options.prioritized:
            exponent = self.options.importance_exponent
            weights *= importance_weights(sample.probabilities, sample.size, exponent, rl.max)
        return batch._replace(
            observation=self.normalized(moments, batch.observation),
            following=self.normalized(moments, batch.following),
            weights=weights,
        )


def new_learner_state(
    sampling: Sampling,
    key: jax.Array,
    adam: optax.GradientTransformation,
    params: dict[str, Any],
    target: dict[str, Any],
) -> LearnerState:
    """The state before the first update: an empty replay, fresh optimizers, counters at 0."""
    options, task = sampling.options, sampling.options.task
    row = example_row(task.env)
    return LearnerState(
        params=params,
        target=target,
        optimizer={name: adam.init(weights) for name, weights in params.items()},
        moments=initial_moments(task.env.observation),
        replay=task.replay(sampling.table, row) if task.online else (),
        key=key,
        steps=jnp.zeros((), jnp.int32),
        updates=jnp.zeros((), jnp.int32),
        data=task.recorded(row, options.n_step),
    )
