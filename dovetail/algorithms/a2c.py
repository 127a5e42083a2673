"""Advantage actor-critic, the synchronous form of https://arxiv.org/abs/1602.01783.

One gradient step on each short unroll: fast per step, less thrifty with samples than PPO.
"""

from dataclasses import dataclass

from dovetail.algorithm import RL, Metrics, Trajectory
from dovetail.algorithms.actor_critic import ActorCriticAlgorithm, LearnerState
from dovetail.errors import check_option
from dovetail.functions.losses import standardize


@dataclass(frozen=True)
class A2C(ActorCriticAlgorithm):
    """Advantage actor-critic: one policy-gradient step per short unroll."""

    unroll_length: int = 8
    """Steps each environment takes between two updates."""
    lambda_: float = 0.95
    """Trade-off of bias and variance in the advantages; 1 for the paper's n-step returns."""
    normalize_advantages: bool = False
    """Whether each batch's advantages are standardized."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("lambda_", self.lambda_, 0 <= self.lambda_ <= 1, "0 to 1")

    def learn(self, rl: RL, state: LearnerState, batch: Trajectory) -> tuple[LearnerState, Metrics]:
        """One gradient step on the whole batch."""
        prepared = self.prepare(rl, state, batch)
        advantages, targets = self.advantages_and_targets(batch, prepared.reward, self.lambda_)
        if self.normalize_advantages:
            advantages = standardize(advantages, prepared.weights, rl.mean)
        return self.policy_gradient_step(rl, state, batch, prepared, advantages, targets)
