"""V-trace of a batch: the learner's view of what older weights did."""

from typing import Any

import jax
import jax.numpy as jnp

from dovetail.blocks.actor_critic import first_row
from dovetail.blocks.normalizing import normalized
from dovetail.functions.distributions import Distribution
from dovetail.functions.normalization import Moments
from dovetail.functions.returns import Clips, VTrace, vtrace
from dovetail.networks.actor_critic import ActorCritic
from dovetail.trajectory import Trajectory


def evaluate_unroll(
    network: ActorCritic, params: Any, moments: Moments, batch: Trajectory, normalize: bool
) -> tuple[Distribution, jax.Array]:
    """The network's distribution [T, B] and values [T + 1, B] on an unroll under other weights.

    The last row of values is that of the observation after the unroll.
    """
    observation, first = jax.tree.map(
        lambda rows, last: jnp.concatenate([rows, last]),
        (batch.observation, batch.first),
        (batch.last.observation, batch.last.first),
    )
    observation = normalized(observation, moments, normalize)
    memory = first_row(batch.carry.memory)
    distribution, values = network.unroll(params, memory, observation, first)
    return jax.tree.map(lambda x: x[:-1], distribution), values


def vtrace_of(
    batch: Trajectory,
    reward: jax.Array,
    log_probs: jax.Array,
    values: jax.Array,
    gamma: float,
    vtrace_lambda: float,
    clips: Clips,
) -> VTrace:
    """V-trace of a batch from the learner's log-probabilities [T, B] and values [T + 1, B].

    The estimates get no gradient.
    """
    trace = vtrace(
        log_ratios=log_probs - batch.extras.log_prob,
        rewards=reward,
        values=values[:-1],
        # A truncated episode's final observation is in no row: its value is the actor's.
        next_values=jnp.where(batch.truncated, batch.bootstrap, values[1:]),
        terminated=batch.terminated,
        truncated=batch.truncated,
        discount=gamma,
        lambda_=vtrace_lambda,
        clips=clips,
    )
    return jax.lax.stop_gradient(trace)
