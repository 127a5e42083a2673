"""The state of an off-policy learner: networks, targets, optimizers, replay and counters."""

from typing import Any, NamedTuple

import jax

from dovetail.functions.normalization import Moments
from dovetail.replay.data import Data
from dovetail.replay.replay import Replay


class LearnerState(NamedTuple):
    """State of a learner that takes gradient steps on replayed or recorded transitions."""

    params: dict[str, Any]
    """Weights by network: "actor", "critics", …"""
    target: dict[str, Any]
    """Weights of the target networks, for some or all of the same names."""
    optimizer: dict[str, Any]
    """Adam's state by network."""
    moments: Moments
    """Running mean and variance of the observations."""
    replay: Replay | tuple[()]
    """The actors' steps; empty when training on recorded data alone."""
    key: jax.Array
    steps: jax.Array
    """Gradient steps so far. Where `gradient_loop` unrolls several steps, the index of the step
    among them, a Python int, so that delayed updates are decided while tracing."""
    updates: jax.Array
    """Iterations so far."""
    data: Data | tuple[()] = ()
    """Recorded steps, if there are any."""
