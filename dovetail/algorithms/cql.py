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


class Goal(NamedTuple):
    """What the critics are told of a batch."""

    values: jax.Array
    """What they should say of the recorded actions [n]."""
    others: jax.Array
    """Actions whose values are pressed down, [count, n, size]."""
    log_densities: jax.Array
    """By which these were drawn, less the logarithm of their number: [count, n]."""


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
        draws = self.samples
        some, others = jax.random.split(keys[3])
        shape = (draws, *after.mean.shape)
        evenly = jax.random.uniform(some, shape, minval=-1.0, maxval=1.0)
        actions, log_probs = _several(after, 1 + draws).sample(keys[0])
        own, own_log_probs = _several(before, draws).sample(others)
        flat = jnp.full(shape[:-1], shape[-1] * math.log(0.5))
        targets = self.some(state.target["critics"], keys[1])
        following = self.critic.apply(targets, batch.following, actions[0], keys[2])[..., 0]
        return Goal(
            values=batch.reward + batch.discount * following.min(axis=0),
            others=jnp.concatenate([evenly, own, actions[1:]]),
            log_densities=jnp.concatenate([flat, own_log_probs, log_probs[1:]])
            + math.log(3 * draws),
        )

    def critic_loss(
        self, params: Any, batch: Batch, goal: Any, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        """Squared errors, summed over the critics, and how far other actions' values stick out."""
        actions = jnp.concatenate([batch.action[None], goal.others])
        count, n = actions.shape[:2]
        observation = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (count, *x.shape)).reshape(count * n, *x.shape[1:]),
            batch.observation,
        )
        flat = self.critic.apply(params, observation, actions.reshape(count * n, -1), key)
        values = flat.reshape(-1, count, n).swapaxes(0, 1)
        errors = values[0] - goal.values
        gap = conservative_gap(values[1:], values[0], goal.log_densities[:, None])
        costs = jnp.sum(jnp.square(errors) + self.conservatism * gap, axis=0)
        loss = jnp.mean(batch.weights * costs)
        metrics = {
            "critic_loss": loss,
            "value": jnp.mean(values[0]),
            "conservative_gap": jnp.mean(gap),
        }
        return loss, (jnp.mean(jnp.abs(errors), axis=0), metrics)


def _several(policy: SquashedGaussian, count: int) -> SquashedGaussian:
    """A distribution of `count` independent actions for each one, [count, n, size]."""
    return SquashedGaussian(*(jnp.broadcast_to(x, (count, *x.shape)) for x in policy))
