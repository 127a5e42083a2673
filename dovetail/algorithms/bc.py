"""Behavioral cloning: the policy under which recorded actions are likeliest.

No reward is looked at, so it comes out about as good as whoever was recorded: what every other
offline algorithm has to beat.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dovetail.algorithm import RL, Metrics
from dovetail.algorithms.cloning import Cloning
from dovetail.algorithms.off_policy import Batch, LearnerState


@dataclass(frozen=True)
class BC(Cloning):
    """Behavioral cloning: does what was recorded."""

    followed: ClassVar[tuple[str, ...]] = ()

    def networks(self, key: jax.Array) -> dict[str, Any]:
        """New parameters of the policy."""
        return {"actor": self.new_policy(key)}

    def actor_loss(self, params: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Minus the mean log-likelihood of what was recorded."""
        loss = self.unlikelihood(self.policy(params, batch.observation), batch)
        return loss, {"actor_loss": loss}

    def gradient_step(
        self, rl: RL, state: LearnerState, batch: Batch, keys: jax.Array
    ) -> tuple[LearnerState, jax.Array, Metrics]:
        """The policy one step along its gradient. No transition has an error: all are alike."""
        actor, metrics = jax.grad(self.actor_loss, has_aux=True)(state.params["actor"], batch)
        return self.descend(rl, state, {"actor": actor}), jnp.zeros(len(batch.reward)), metrics
