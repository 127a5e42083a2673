"""Asynchronous advantage actor-critic, https://arxiv.org/abs/1602.01783.

Actors compute gradients from their own unrolls and send only these; the learner applies them, even
if its weights have moved on. Each actor sends the gradient of its losses' sum and its share of
valid steps, so that however the environments are split, the quotient is the gradient of them all:
synchronously it is A2C. The optimizer is the learner's alone, what the paper calls shared.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.algorithm import RL, Correction, Metrics, Trajectory
from dovetail.algorithms.actor_critic import (
    Acting,
    ActorCriticAlgorithm,
    LearnerState,
    first_memory,
)
from dovetail.errors import check_option
from dovetail.functions.normalization import (
    Moments,
    Sums,
    batch_sums,
    initial_moments,
    scale,
    update,
)


class Contribution(NamedTuple):
    """What an actor sends: averages over all its steps, in which invalid ones count as nothing."""

    gradients: Any
    metrics: Metrics
    share: jax.Array
    """Of its steps that are valid."""
    observations: Any
    """`Sums` of observations; empty unless they are normalized."""
    returns: Any
    """`Sums` of discounted returns; empty unless rewards are normalized."""


@dataclass(frozen=True)
class A3C(ActorCriticAlgorithm):
    """Asynchronous advantage actor-critic: actors send gradients, the learner applies them."""

    correction: ClassVar[Correction] = Correction("nothing, but bears stale gradients", None)

    unroll_length: int = 8
    """Steps each environment takes between two updates."""
    lambda_: float = 0.95
    """Trade-off of bias and variance in the advantages; 1 for the paper's n-step returns."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("lambda_", self.lambda_, 0 <= self.lambda_ <= 1, "0 to 1")

    def iteration(self, rl: RL, state: LearnerState) -> tuple[LearnerState, Metrics]:
        """Actors unroll and differentiate; the learner applies their averaged gradients."""
        params, return_moments = rl.broadcast((self.acting(state), state.return_moments))
        trajectory = rl.unroll(self.act, params, self.unroll_length, bootstrap=self.value)
        contribution = rl.reduce(self.contribute(params, return_moments, trajectory))
        return self.apply(state, contribution)

    def contribute(
        self, params: Acting, return_moments: Moments, batch: Trajectory
    ) -> Contribution:
        """An actor's part, from its own unroll and what it was sent."""
        valid = batch.valid.astype(jnp.float32)
        # Only the learner knows everyone's returns: rewards are scaled as of the update before.
        reward = scale(return_moments, batch.reward) if self.normalize_rewards else batch.reward
        advantages, targets = self.advantages_and_targets(batch, reward, self.lambda_)
        observation = self._normalized(params.moments, batch.observation)

        def loss(network: Any) -> tuple[jax.Array, Metrics]:
            outputs = self.network.unroll(network, first_memory(batch), observation, batch.first)
            return self.policy_gradient_loss(outputs, batch.action, advantages, targets, valid)

        gradients, metrics = jax.grad(loss, has_aux=True)(params.network)
        sums = jax.tree.map(lambda x: x / valid.size, self._sums(batch, valid))
        return Contribution(gradients, metrics, jnp.mean(valid), *sums)

    def _sums(self, batch: Trajectory, valid: jax.Array) -> tuple[Any, Any]:
        """Those of observations and of discounted returns.

        They are taken around 0: the running means of actors with different weights differ.
        """
        observations: Any = ()
        returns: Any = ()
        if self.normalize_observations:
            start = initial_moments(self.task.env.observation)
            observations = batch_sums(start, batch.observation, valid)
        if self.normalize_rewards:
            discounted = self.discount * batch.extras.discounted_return + batch.reward
            returns = batch_sums(initial_moments(discounted[0, 0]), discounted, valid)
        return observations, returns

    def apply(
        self, state: LearnerState, contribution: Contribution
    ) -> tuple[LearnerState, Metrics]:
        """The learner's part: one step along the gradients of all valid steps."""
        share = jnp.where(contribution.share > 0, contribution.share, 1.0)
        gradients, metrics = jax.tree.map(
            lambda x: x / share, (contribution.gradients, contribution.metrics)
        )
        params, optimizer = self.descend(state, gradients)
        return state._replace(
            params=params,
            optimizer=optimizer,
            moments=self._updated(state.moments, contribution.observations),
            return_moments=self._updated(state.return_moments, contribution.returns),
            updates=state.updates + 1,
        ), metrics

    def _updated(self, moments: Moments, averages: Any) -> Moments:
        """The moments with a whole batch more, whose averages these are; as they were if empty."""
        if not averages:
            return moments
        steps = self.unroll_length * self.task.num_envs
        sums = jax.tree.map(lambda x: steps * x, averages)
        return update(moments, around(moments.mean, sums))


def around(mean: Any, sums: Sums) -> Sums:
    """Sums of deviations from 0 as those from `mean`."""
    weight = sums.weight
    second = jax.tree.map(
        lambda second, first, m: second - 2.0 * m * first + weight * jnp.square(m),
        sums.second,
        sums.first,
        mean,
    )
    return Sums(weight, jax.tree.map(lambda f, m: f - weight * m, sums.first, mean), second)
