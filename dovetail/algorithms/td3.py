"""Twin delayed deep deterministic policy gradient, https://arxiv.org/abs/1802.09477.

DDPG with three remedies for values that are too high: of two critics the lower one counts, the
target's action is blurred by noise, and the policy moves only every other step.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from dovetail.algorithm import RL, Metrics
from dovetail.algorithms.ddpg import DDPG
from dovetail.algorithms.off_policy import Batch, LearnerState
from dovetail.errors import check_option


@dataclass(frozen=True)
class TD3(DDPG):
    """DDPG with twin critics, a smoothed target and delayed policy steps."""

    critics: ClassVar[int] = 2

    target_noise: float = 0.2
    """The deviation of the noise on the target's action."""
    target_noise_clip: float = 0.5
    """The most that this noise may be."""
    actor_every: int = 2
    """Gradient steps of the critics for each of the policy and of the target networks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("target_noise", "target_noise_clip"):
            check_option(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        check_option("actor_every", self.actor_every, self.actor_every >= 1, "1 or more")

    @property
    def rhythm(self) -> int:
        """Gradient steps of the critics for each of the policy."""
        return self.actor_every

    def goal(self, state: LearnerState, batch: Batch, keys: jax.Array) -> jax.Array:
        """What the critics should say [n], from a target whose action is blurred."""
        return self.blurred_goal(state, batch, jax.random.normal(keys[0], batch.action.shape))

    def blurred_goal(self, state: LearnerState, batch: Batch, noise: jax.Array) -> jax.Array:
        """The same, from normal numbers of the actions' shape."""
        action = self.policy(state.target["actor"], batch.following)
        limit = self.target_noise_clip
        action = action + jnp.clip(self.target_noise * noise, -limit, limit)
        action = jnp.clip(action, -1.0, 1.0)
        following = self.values(state.target["critics"], batch.following, action)
        return batch.reward + batch.discount * following.min(axis=0)

    def prepared(self, state: LearnerState, batches: Batch, keys: jax.Array) -> Batch:
        """With the goals of them all, as if they were one batch: the target networks follow only
        after the last."""
        noise = jax.vmap(lambda key: jax.random.normal(key, batches.action.shape[1:]))(keys[:, 0])
        joined = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (batches, noise))
        goal = self.blurred_goal(state, *joined)
        return batches._replace(goal=goal.reshape(batches.reward.shape))

    def gradient_step(
        self, rl: RL, state: LearnerState, batch: Batch, keys: jax.Array
    ) -> tuple[LearnerState, jax.Array, Metrics]:
        """The critics one step along their gradients; every so often the policy as well, and then
        the target networks follow."""
        critics, (errors, found) = jax.grad(self.critic_loss, has_aux=True)(
            state.params["critics"], batch, batch.goal
        )
        state = self.descend(rl, state, {"critics": critics})

        def improve(state: LearnerState) -> tuple[LearnerState, Metrics]:
            actor, metrics = jax.grad(self.actor_loss, has_aux=True)(
                state.params["actor"], state.params["critics"], batch, rl.mean
            )
            return self.follow(self.descend(rl, state, {"actor": actor})), metrics

        state, metrics = self.at_times(improve, state)
        return state, errors, found | metrics
