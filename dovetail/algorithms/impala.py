"""IMPALA, https://arxiv.org/abs/1802.01561: actors that run ahead, corrected by V-trace.

Actors act on weights that are some versions old. The learner weighs what they did by how likely it
still is, cut off at 1 so that the variance stays small, and values every step by its own weights,
what follows the unroll included. On trajectories of its own policy it is A2C.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.algorithm import RL, Correction, Metrics, Trajectory
from dovetail.algorithms.actor_critic import ActorCriticAlgorithm, LearnerState
from dovetail.errors import check_option
from dovetail.functions.gradients import gradient
from dovetail.functions.losses import explained_variance, weighted_mean
from dovetail.functions.normalization import Moments
from dovetail.functions.returns import Clips, VTrace, vtrace


class Samples(NamedTuple):
    """What a gradient step learns from: leaves [T, B, …]."""

    batch: Trajectory
    reward: jax.Array
    weights: jax.Array


@dataclass(frozen=True)
class IMPALA(ActorCriticAlgorithm):
    """Importance-weighted actor-learner: one policy-gradient step per unroll, however old."""

    correction: ClassVar[Correction] = Correction("V-trace", None)

    unroll_length: int = 32
    """Steps each environment takes between two updates."""
    lambda_: float = 1.0
    """Trade-off of bias and variance in targets and advantages; 1 as in the paper."""
    rho_clip: float = 1.0
    """Where ratios are cut off in a step's own error: decides which policy's value is learned."""
    c_clip: float = 1.0
    """Where ratios are cut off in what a step passes back."""
    gradient_clip: float = 1.0
    """Where ratios are cut off in the policy's gradient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("lambda_", self.lambda_, 0 <= self.lambda_ <= 1, "0 to 1")
        for name in ("rho_clip", "c_clip", "gradient_clip"):
            check_option(name, getattr(self, name), getattr(self, name) > 0, "more than 0")

    # The optimizer is Adam, where the paper has RMSProp: it learns better on small tasks.

    def learn(self, rl: RL, state: LearnerState, batch: Trajectory) -> tuple[LearnerState, Metrics]:
        """One gradient step on the whole batch."""
        prepared = self.prepare(rl, state, batch)
        samples = Samples(batch._replace(next_observation=()), prepared.reward, prepared.weights)
        gradients, metrics = gradient(self._loss, state.params, samples, state.moments, axis=1)
        params, optimizer = self.descend(state, rl.mean(gradients))
        return self.next_state(state, prepared, params, optimizer), metrics

    def _loss(self, params: Any, samples: Samples, moments: Moments) -> tuple[jax.Array, Metrics]:
        """One pass of the network gives the estimates, and what learns from them."""
        batch, reward, weights = samples
        # The present moments, as the present weights: what the learner's policy would make of it.
        distribution, values = self.revisit(params, moments, batch)
        log_probs = distribution.log_prob(batch.action)
        clips = Clips(self.rho_clip, self.c_clip, self.gradient_clip)
        trace = corrected(batch, reward, log_probs, values, self.discount, self.lambda_, clips)
        loss, metrics = self.policy_gradient_loss(
            (distribution, values[:-1]),
            batch.action,
            trace.weights * trace.advantages,
            trace.targets,
            weights,
        )
        metrics["explained_variance"] = explained_variance(values[:-1], trace.targets, weights)
        metrics["mean_ratio"] = weighted_mean(trace.weights, weights)
        return loss, metrics


def corrected(
    batch: Trajectory,
    reward: jax.Array,
    log_probs: jax.Array,
    values: jax.Array,
    discount: float,
    lambda_: float,
    clips: Clips,
) -> VTrace:
    """V-trace of a batch, from the learner's log-probabilities [T, B] and values [T + 1, B]."""
    trace = vtrace(
        log_ratios=log_probs - batch.extras.log_prob,
        rewards=reward,
        values=values[:-1],
        # A truncated episode's final observation is in no row: its value is the actor's.
        next_values=jnp.where(batch.truncated, batch.bootstrap, values[1:]),
        terminated=batch.terminated,
        truncated=batch.truncated,
        discount=discount,
        lambda_=lambda_,
        clips=clips,
    )
    return jax.lax.stop_gradient(trace)
