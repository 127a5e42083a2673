"""TD3 with behavioral cloning, https://arxiv.org/abs/2106.06860.

TD3 whose policy is also held to the recorded actions: it climbs the critic's slope only as far as
that is worth the distance. Values are scaled to a mean size of 1 first, so that one
`value_weight` suits rewards of any size.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dovetail.algorithm import Metrics
from dovetail.algorithms.ddpg import Mean, alone
from dovetail.algorithms.off_policy import Batch
from dovetail.algorithms.td3 import TD3
from dovetail.errors import check_option


@dataclass(frozen=True)
class TD3BC(TD3):
    """TD3 that stays near the recorded actions."""

    needs_data: ClassVar[bool] = True

    learning_rate: float = 3e-4
    """Adam's step size."""
    value_weight: float = 2.5
    """What value counts, once its mean size is 1, against the squared distance from the recorded
    actions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        weight = self.value_weight
        check_option("value_weight", weight, weight >= 0, "0 or more")

    def actor_loss(
        self, params: Any, critics: Any, batch: Batch, mean: Mean = alone
    ) -> tuple[jax.Array, Metrics]:
        """The squared distance from the recorded actions, less the value that the first critic
        sees in the policy's own."""
        action = self.policy(params, batch.observation)
        first = jax.tree.map(lambda x: x[:1], critics)
        values = self.values(first, batch.observation, action)
        size = mean(jnp.mean(jnp.abs(jax.lax.stop_gradient(values))))
        distances = jnp.mean(jnp.square(action - batch.action), axis=-1)
        imitation = jnp.mean(batch.weights * distances)
        loss = imitation - self.value_weight * jnp.mean(values) / size
        return loss, {"actor_loss": loss, "imitation_loss": imitation}
