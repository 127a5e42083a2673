"""The actors' input, `Timestep`, and the result of an unroll, `Trajectory`."""

from typing import Any, NamedTuple

import jax
import numpy as np


class Timestep(NamedTuple):
    """The input of an actor: one environment's latest step."""

    observation: Any
    reward: jax.Array
    """The reward of the previous action; 0 at the first step of an episode."""
    first: jax.Array
    """Whether this is the first step of an episode; if so, the carry was reset."""
    number: Any = np.int32(0)
    """The environment's index among all training environments; 0 in evaluation."""


class Trajectory(NamedTuple):
    """The result of `unroll`: leaves [T, B, …], time-major; axis 1 is the environment axis."""

    observation: Any
    action: Any
    reward: jax.Array
    terminated: jax.Array
    """The episode reached a terminal state; its value beyond is zero."""
    truncated: jax.Array
    """The episode was cut off by a time limit; bootstrap the value beyond."""
    first: jax.Array
    """Whether `observation` is the first of an episode."""
    valid: jax.Array
    """False for steps in which a back end only reset itself; mask these in losses."""
    next_observation: Any
    """The observation after the action, including the true final one. Computed only if used."""
    extras: Any
    """The extras returned by `act`: log-probabilities, values, …"""
    bootstrap: Any
    """`bootstrap(params, carry, timestep)` at the true final observation of each truncated episode
    and after the last step (even if that step terminated: mask it); zero elsewhere. Empty unless
    `unroll` was given a `bootstrap`."""
    carry: Any
    """The carry at the start of the unroll, [1, B, …]."""
    last: Timestep
    """The actors' timestep after the last step, [1, B, …]."""
