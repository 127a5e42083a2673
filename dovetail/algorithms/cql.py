"""Conservative Q-learning for continuous actions, https://arxiv.org/abs/2006.04779.

Soft actor-critic whose critics are also pressed: down where actions are that the policy or chance
would take, up where the recorded ones are. So what nobody tried looks no better than what was
tried. Unusual here: the target has no entropy in it, as in the authors' code, and the weight of
the penalty is fixed.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.algorithm import Metrics
from dovetail.algorithms.off_policy import Batch, LearnerState
from dovetail.algorithms.sac import SAC
from dovetail.errors import check_option
from dovetail.functions.distributions import SquashedGaussian
from dovetail.functions.offline import conservative_gap
from dovetail.keys import on_axis


class Goal(NamedTuple):
    """What the critics are told of a batch."""

    values: jax.Array
    """What they should say of the recorded actions [n]."""
    others: jax.Array
    """Actions whose values are pressed down, [n, count, size]."""
    log_densities: jax.Array
    """By which these were drawn, less the logarithm of their number: [n, count]."""


@dataclass(frozen=True)
class CQL(SAC):
    """Conservative Q-learning: soft actor-critic that distrusts what was not recorded."""

    needs_data: ClassVar[bool] = True

    learning_rate: float = 3e-4
    """Adam's step size."""
    conservatism: float = 5.0
    """What the gap between other actions' values and the recorded ones' costs the critics."""
    samples: int = 10
    """Actions drawn for each transition in three ways: evenly, and by the policy before and after
    it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("conservatism", self.conservatism, self.conservatism >= 0, "0 or more")
        check_option("samples", self.samples, self.samples >= 1, "1 or more")

    def goal(self, state: LearnerState, batch: Batch, keys: jax.Array) -> Any:
        """A `Goal`: rewards and what targets expect of the policy, and the other actions."""
        after = self.policy(state.params["actor"], batch.following)
        before = self.policy(state.params["actor"], batch.observation)
        n, size = after.mean.shape
        some, others = jax.random.split(keys[3])
        evenly = jax.random.uniform(some, (n, self.samples, size), minval=-1.0, maxval=1.0)
        flat = jnp.full((n, self.samples), size * math.log(0.5))
        own, own_densities = _several(before, self.samples).sample(others)
        next_, next_densities = _several(after, 1 + self.samples).sample(keys[0])
        targets = self.some(state.target["critics"], keys[1])
        following = self.critic.apply(targets, batch.following, next_[:, 0], keys[2])[..., 0]
        log_densities = jnp.concatenate([flat, own_densities, next_densities[:, 1:]], axis=1)
        return Goal(
            values=batch.reward + batch.discount * following.min(axis=0),
            others=jnp.concatenate([evenly, own, next_[:, 1:]], axis=1),
            log_densities=log_densities + math.log(3 * self.samples),
        )

    def critic_loss(
        self, params: Any, batch: Batch, goal: Any, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        """Squared errors, summed over the critics, and how far other actions' values stick out."""
        actions = jnp.concatenate([batch.action[:, None], goal.others], axis=1)
        n, count, size = actions.shape
        observation = jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), batch.observation)
        rows = on_axis(key, 0, count)  # so many for each item
        found = self.critic.apply(params, observation, actions.reshape(n * count, size), rows)
        values = found.reshape(-1, n, count)  # of each critic; the recorded action's come first
        taken = values[..., 0]
        errors = taken - goal.values
        gap = conservative_gap(values[..., 1:], taken, goal.log_densities)
        costs = jnp.sum(jnp.square(errors) + self.conservatism * gap, axis=0)
        loss = jnp.mean(batch.weights * costs)
        metrics = {
            "critic_loss": loss,
            "value": jnp.mean(taken),
            "conservative_gap": jnp.mean(gap),
        }
        return loss, (jnp.mean(jnp.abs(errors), axis=0), metrics)


def _several(policy: SquashedGaussian, count: int) -> SquashedGaussian:
    """A distribution of `count` independent actions for each one, [n, count, size]."""
    return SquashedGaussian(*(jnp.repeat(x[:, None], count, axis=1) for x in policy))
