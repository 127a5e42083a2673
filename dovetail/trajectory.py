"""What actors see of their environments, and what an unroll records."""

from typing import Any, NamedTuple

import jax
import numpy as np


class Timestep(NamedTuple):
    """What an actor sees of its environment before it acts."""

    observation: Any
    reward: jax.Array
    """The last action's reward; 0 at an episode's first step."""
    first: jax.Array
    """Whether an episode begins here; the carry was reset if so."""
    number: Any = np.int32(0)
    """The environment's number among all that train; 0 when evaluated."""


class Trajectory(NamedTuple):
    """What `unroll` returns: leaves [T, B, …], time first; axis 1 is the environments' in each."""

    observation: Any
    action: Any
    reward: jax.Array
    terminated: jax.Array
    """The episode ended in the task's own sense: nothing comes after."""
    truncated: jax.Array
    """The episode was cut by a time limit: value goes on beyond it, bootstrap."""
    first: jax.Array
    """Whether `observation` began an episode."""
    valid: jax.Array
    """False for the steps in which a back end only reset itself: leave these out of losses."""
    next_observation: Any
    """Where the action led, the true final observation included. Costs nothing unless used."""
    extras: Any
    """What `act` returned beside the action: log-probabilities, values, …"""
    bootstrap: Any
    """`bootstrap(params, carry, timestep)` at each true final observation of a truncated episode
    and after the last step (also where that one terminated: mask it); zero elsewhere. Empty
    unless `unroll` was given one."""
    carry: Any
    """The carry with which the unroll began, [1, B, …]."""
    last: Timestep
    """What the actors see after the last step, [1, B, …]."""
