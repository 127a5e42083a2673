"""APPO: PPO for actors that run ahead, https://arxiv.org/abs/1912.00167, https://arxiv.org/abs/2006.11751.

The clipped ratio is that of the learner to whoever acted, so a batch may be some versions old;
advantages and targets are V-trace's, from the learner's own values. They are found once per batch,
before its epochs, and are not weighed by the ratio, which the surrogate already is. On trajectories
of its own policy it is PPO.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax

from dovetail.algorithm import Correction, Trajectory
from dovetail.algorithms.actor_critic import LearnerState, Prepared
from dovetail.algorithms.impala import corrected
from dovetail.algorithms.ppo import PPO
from dovetail.errors import check_option
from dovetail.functions.returns import Clips


@dataclass(frozen=True)
class APPO(PPO):
    """Asynchronous PPO: clipped policy gradients with V-trace's advantages."""

    correction: ClassVar[Correction] = Correction("V-trace", None)

    unroll_length: int = 64
    """Steps each environment takes between two updates."""
    rho_clip: float = 1.0
    """Where ratios are cut off in a step's own error: decides which policy's value is learned."""
    c_clip: float = 1.0
    """Where ratios are cut off in what a step passes back."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rho_clip", "c_clip"):
            check_option(name, getattr(self, name), getattr(self, name) > 0, "more than 0")

    def estimate(
        self, state: LearnerState, batch: Trajectory, prepared: Prepared
    ) -> tuple[jax.Array, jax.Array]:
        """(advantages, targets of the value) by V-trace, once per batch."""
        distribution, values = self.revisit(state.params, state.moments, batch)
        log_probs = distribution.log_prob(batch.action)
        clips = Clips(self.rho_clip, self.c_clip)
        trace = corrected(
            batch, prepared.reward, log_probs, values, self.discount, self.lambda_, clips
        )
        return trace.advantages, trace.targets
