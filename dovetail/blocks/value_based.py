"""Blocks of Q-learning from a replay: rows, batches, and the scan of gradient steps.

DQN, QR-DQN, Ape-X and R2D2 store rows of steps in a replay, turn samples of it (and of recorded
data) into K batches of n items, and scan gradient steps over the K batches. Each of them writes its
own loss and gradient step.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.algorithm import RL, Metrics, Task, Trajectory
from dovetail.envs.interface import EnvSpec
from dovetail.replay.sample import ItemKeys, Sample, importance_weights

LEAST_PRIORITY = 1e-6
"""Added to every error, so that an item without error can still be sampled."""


class ItemRow(NamedTuple):
    """One step in the replay."""

    observation: Any
    action: Any
    reward: Any
    terminated: Any


class ItemBatch(NamedTuple):
    """The items of a gradient step [n, …]; those of K gradient steps are [K, n, …]."""

    rows: Any
    """The window of steps of each item, as `ItemRow` or with more fields [n, W, …]."""
    mask: jax.Array
    """Which rows of a window are steps [n, W]. The row behind the last step shows where it led."""
    weights: jax.Array
    """The weight of each item in the loss [n]."""


class QParams(NamedTuple):
    """The parameters of an ε-greedy actor."""

    network: jax.Array
    """The network's weights, as one vector."""
    epsilon: jax.Array
    """The probability of a random action."""


class QExtras(NamedTuple):
    """What an ε-greedy `act` adds to the trajectory; only recordings read it."""

    log_prob: jax.Array


class Learned(NamedTuple):
    """The part of a learner's state that a gradient step changes."""

    params: Any
    """The network's weights."""
    target: Any
    """The target network's weights."""
    optimizer: Any


def row_shapes(env: EnvSpec) -> ItemRow:
    """The shapes and dtypes of a row, for an empty replay or dataset."""
    return ItemRow(
        observation=env.observation,
        action=jax.ShapeDtypeStruct((), jnp.int32),
        reward=jax.ShapeDtypeStruct((), jnp.float32),
        terminated=jax.ShapeDtypeStruct((), jnp.bool_),
    )


def rows_of(steps: Trajectory) -> tuple[ItemRow, ItemRow]:
    """(rows, final rows) of a trajectory [T, B, …], as `rl.insert` takes them.

    The final rows hold the observation after each step, which is stored where an episode ends.
    """
    rows = ItemRow(steps.observation, steps.action, steps.reward, steps.terminated)
    return rows, ItemRow(steps.next_observation, None, None, None)


def recorded_items(task: Task, batch_size: int, share: float) -> int:
    """How many items of a batch are recorded: none without data, all of them offline, and `share`
    of the batch (at least one item, and not all) where actors add to a replay as well."""
    if task.data is None:
        return 0
    if not task.online:
        return batch_size
    return min(max(round(share * batch_size), 1), batch_size - 1)


def recorded_draws(key: jax.Array, gradient_steps: int, items: int) -> jax.Array:
    """Draws [K, n] for `rl.recall`, independent of those made with `key` itself."""
    return jax.random.bits(jax.random.fold_in(key, 2), (gradient_steps, items), jnp.uint32)


def batches_of(
    rl: RL, samples: Sequence[Sample], importance_exponent: float | None = None
) -> ItemBatch:
    """The items of samples [K, n, …] from several sources, joined to K batches.

    With an exponent, items are weighted by their probability of being sampled: β of
    https://arxiv.org/abs/1511.05952 (section 3.4). Without, all have weight 1.
    """
    batches = [_batches(rl, sample, importance_exponent) for sample in samples]
    if len(batches) == 1:
        return batches[0]
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *batches)


def _batches(rl: RL, sample: Sample, importance_exponent: float | None) -> ItemBatch:
    # An item whose episode broke off before its first step ended has no step: its weight is 0.
    weights = jnp.asarray(sample.mask[:, :, 0], jnp.float32)
    if importance_exponent is not None:
        weights *= importance_weights(
            sample.probabilities, sample.size, importance_exponent, rl.max
        )
    return ItemBatch(sample.rows, jnp.asarray(sample.mask), weights)


def new_priorities(errors: jax.Array, keys: ItemKeys) -> jax.Array:
    """Priorities of the replayed items `keys`, which come first in batches with errors [K, n]."""
    return errors[:, : keys.slot.shape[1]] + LEAST_PRIORITY


def scan_batches(
    step: Callable[..., tuple[Learned, tuple[jax.Array, Metrics]]],
    start: Learned,
    batches: Any,
    enough: jax.Array,
) -> tuple[Learned, jax.Array, Metrics]:
    """(end, errors [K, n], metrics): gradient steps on K batches, one after the other.

    `step(learned, *batch)` returns what it learned, and (errors [n], metrics) of its batch. The
    metrics are the averages of all steps. Unless there is `enough` in the replay, nothing is
    learned and the metrics are 0.
    """

    def scanned(old: Learned, batch: Any) -> tuple[Learned, tuple[jax.Array, Metrics]]:
        new, found = step(old, *batch)
        return jax.tree.map(lambda a, b: jnp.where(enough, a, b), new, old), found

    end, (errors, metrics) = jax.lax.scan(scanned, start, batches)
    means = {name: jnp.where(enough, jnp.mean(x), 0.0) for name, x in metrics.items()}
    return end, errors, means
