"""Epochs of minibatches over one batch.

A minibatch is the same set of samples however environments are split among actors and learners:
rows of time, the same for every environment, or whole unrolls of every n-th environment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.algorithm import Metrics
from dovetail.blocks.actor_critic import Samples
from dovetail.errors import UserError


@dataclass(frozen=True)
class Minibatches:
    """A batch cut into units, which are shuffled and taken `units / count` at a time."""

    take: Callable[[jax.Array], Samples]
    """The minibatch of the units with these indices."""
    units: int
    count: int
    """Minibatches per epoch."""


class MinibatchProgress(NamedTuple):
    """What goes round the loop of gradient steps."""

    params: Any
    optimizer: Any
    going: jax.Array
    """Whether the divergence is still below its limit."""


def time_rows(samples: Samples, count: int, algorithm: str) -> Minibatches:
    """Minibatches of whole time rows; `algorithm` is the name that a refusal tells.

    They are flattened to [rows × B, …], which XLA multiplies faster than [rows, B, …].
    """
    length = samples.first.shape[0]
    if length % count:
        raise UserError(
            f"{algorithm} splits an unroll of {length} steps into {count} minibatches, but "
            f"{length} is not a multiple of {count}: change --unroll-length or --num-minibatches."
        )

    def take(rows: jax.Array) -> Samples:
        return jax.tree.map(lambda x: x[rows].reshape(-1, *x.shape[2:]), samples)

    return Minibatches(take, length, count)


def environment_groups(samples: Samples, count: int, algorithm: str) -> Minibatches:
    """Minibatches of whole unrolls [T, B / count, …], so that a memory can be replayed.

    Group g has every environment i with i ≡ g (mod count); `algorithm` is the name that a refusal
    tells.
    """
    envs = samples.first.shape[1]
    if envs % count:
        raise UserError(
            f"Recurrent {algorithm} splits {envs} environments into {count} minibatches, but "
            f"{envs} is not a multiple of {count}: change --num-envs or --num-minibatches."
        )

    def groups(x: jax.Array) -> jax.Array:
        # Every `count`-th environment: each actor's share then has equally many in every group.
        return x.reshape(x.shape[0], envs // count, count, *x.shape[2:])

    def take(group: jax.Array) -> Samples:
        return jax.tree.map(lambda x: groups(x)[:, :, group[0]], samples)

    return Minibatches(take, count, count)


def epochs_of_minibatches(
    step: Callable[[MinibatchProgress, Samples], tuple[MinibatchProgress, Metrics]],
    start: MinibatchProgress,
    minibatches: Minibatches,
    epochs: int,
    key: jax.Array,
) -> tuple[MinibatchProgress, Metrics]:
    """Takes a gradient step on every minibatch of every epoch, each epoch in another random order.

    Returns the progress after the last step, and the metrics averaged over all steps.
    """
    shuffle = jax.vmap(lambda key: jax.random.permutation(key, minibatches.units))
    order = shuffle(jax.random.split(key, epochs)).reshape(epochs * minibatches.count, -1)
    progress, metrics = jax.lax.scan(
        lambda progress, units: step(progress, minibatches.take(units)), start, order
    )
    return progress, jax.tree.map(jnp.mean, metrics)


def stop_at_divergence(
    before: MinibatchProgress, after: MinibatchProgress, kl: jax.Array, target_kl: float
) -> MinibatchProgress:
    """`after` a gradient step, or `before` once a step's divergence exceeds 1.5 × `target_kl`."""
    going = before.going & (kl <= 1.5 * target_kl)
    # Once stopped, `going` stays false and later steps change nothing.
    kept = jax.tree.map(lambda new, old: jnp.where(going, new, old), after, before)
    return kept._replace(going=going)
