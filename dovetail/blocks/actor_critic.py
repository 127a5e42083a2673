"""The records of actor-critic algorithms, and the advantages of an unroll.

Observations are normalized by moments that travel with the weights, so acting and learning always
agree. For reward normalization each environment's carry holds its discounted return so far; the
learner reads it from the trajectory, so it does not depend on how environments are split.
"""

from typing import Any, NamedTuple

import jax

from dovetail.functions.normalization import Moments
from dovetail.functions.returns import generalized_advantages, successor_values
from dovetail.trajectory import Trajectory


class ActorCriticParams(NamedTuple):
    """What the learner broadcasts: the network's weights and the observations' moments."""

    network: Any
    moments: Moments


class ActorCarry(NamedTuple):
    """One environment's carry: the network's memory and the episode's discounted return so far."""

    memory: Any
    discounted_return: Any
    """A scalar; empty unless rewards are normalized."""


class ActorCriticExtras(NamedTuple):
    """What acting records beside the action."""

    log_prob: jax.Array
    value: jax.Array
    discounted_return: Any
    """Of the rewards before this step; empty unless rewards are normalized."""


class Samples(NamedTuple):
    """What a gradient step learns from: leaves [T, B, …], or one minibatch of them."""

    observation: Any
    """Normalized, if the algorithm normalizes."""
    action: Any
    log_prob: Any
    """Of the action when it was taken; empty unless the loss reads it."""
    value: Any
    """Of the observation when it was acted on; empty unless the loss reads it."""
    advantage: jax.Array
    target: jax.Array
    """Of the value."""
    weights: jax.Array
    """Of each step in the loss; 0 where it is not valid."""
    first: jax.Array
    memory: Any
    """The network's memory when the unroll began, [1, B, …]; empty without a memory."""


def advantages_and_targets(
    batch: Trajectory, reward: jax.Array, discount: float, lambda_: float
) -> tuple[jax.Array, jax.Array]:
    """Generalized advantages and the value's targets (advantage + value), both [T, B].

    Values are those that the actors recorded; `reward` is the batch's, normalized or not.
    """
    values, ends = batch.extras.value, (batch.terminated, batch.truncated)
    next_values = successor_values(values, batch.bootstrap, *ends)
    advantages = generalized_advantages(reward, values, next_values, *ends, discount, lambda_)
    return advantages, advantages + values


def first_row(tree: Any) -> Any:
    """Row 0 of a tree of arrays [T, …]."""
    return jax.tree.map(lambda x: x[0], tree)
