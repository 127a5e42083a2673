"""Acting of the off-policy algorithms: uniformly random actions before learning begins.

Continuous actions are in [-1, 1]; the environment's adapter maps them to its bounds.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.algorithm import Task
from dovetail.envs.interface import ActionSpace, Continuous, Discrete
from dovetail.errors import UserError
from dovetail.functions.normalization import Moments


class PolicyParams(NamedTuple):
    """What actors need of the learner's state."""

    network: Any
    """Weights of the policy."""
    moments: Moments
    """Mean and variance that normalize observations."""
    warming: jax.Array
    """Whether actions are still uniformly random."""


class PolicyExtras(NamedTuple):
    """What an actor adds to a step for recordings; learning does not use it."""

    log_prob: jax.Array


def random_action(space: ActionSpace, key: jax.Array) -> jax.Array:
    """A uniformly random action."""
    match space:
        case Continuous(size=size):
            return jax.random.uniform(key, (size,), minval=-1.0, maxval=1.0)
        case Discrete(n=n):
            return jax.random.randint(key, (), 0, n, jnp.int32)
        case other:
            raise NotImplementedError(f"There is no random action of {other}.")


def random_log_prob(space: ActionSpace) -> float:
    """Log-probability, or density, of a uniformly random action."""
    match space:
        case Continuous(size=size):
            return -size * math.log(2)
        case Discrete(n=n):
            return -math.log(n)
        case other:
            raise NotImplementedError(f"There is no random action of {other}.")


def check_bounded(algorithm: str, task: Task) -> None:
    """Refuses continuous actions without bounds to explore within."""
    action = task.env.action
    if isinstance(action, Continuous) and not action.bounded:
        raise UserError(
            f"{algorithm} explores within the bounds of actions, but {task.env.id} "
            f"takes {action}: bound every entry in a wrapper, or choose ppo."
        )
