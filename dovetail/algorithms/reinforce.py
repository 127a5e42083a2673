"""REINFORCE with a learned baseline, https://doi.org/10.1007/BF00992696.

Monte-Carlo returns, less the baseline, weigh the policy's gradient. An episode that the end of an
unroll cuts goes on in the next one: its return is completed by the baseline's value there.
"""

from dataclasses import dataclass

from dovetail.algorithm import RL, Metrics, Trajectory
from dovetail.algorithms.actor_critic import ActorCriticAlgorithm, LearnerState
from dovetail.functions.losses import standardize
from dovetail.functions.returns import discounted_returns, successor_values


@dataclass(frozen=True)
class REINFORCE(ActorCriticAlgorithm):
    """REINFORCE with baseline: Monte-Carlo policy gradients."""

    unroll_length: int = 128
    """Steps each environment takes between two updates."""
    learning_rate: float = 3e-3
    """Adam's step size."""
    normalize_advantages: bool = True
    """Whether each batch's advantages are standardized."""

    def learn(self, rl: RL, state: LearnerState, batch: Trajectory) -> tuple[LearnerState, Metrics]:
        """One gradient step on the whole batch."""
        prepared = self.prepare(rl, state, batch)
        values, ends = batch.extras.value, (batch.terminated, batch.truncated)
        next_values = successor_values(values, batch.bootstrap, *ends)
        returns = discounted_returns(prepared.reward, next_values, *ends, self.discount)
        advantages = returns - values
        if self.normalize_advantages:
            advantages = standardize(advantages, prepared.weights, rl.mean)
        return self.policy_gradient_step(rl, state, batch, prepared, advantages, returns)
