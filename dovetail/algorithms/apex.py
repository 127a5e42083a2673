"""Ape-X DQN, https://arxiv.org/abs/1803.00933: many actors, one prioritized replay, one learner.

Each environment's actor explores by a share of its own, from 0.4 down to nearly nothing, so that
the replay holds all sorts of behavior at any time. Actors say how surprising each of their steps
was when they insert it, by the values that they acted on: the learner need not see an item before
it is known how much it has to teach. Double, dueling, with n-step returns.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dovetail.algorithm import RL, Carry, Metrics, Timestep, Trajectory
from dovetail.algorithms.value_based import LEAST_PRIORITY, Acting, Laddered, LearnerState
from dovetail.functions.exploration import epsilon_greedy, epsilon_greedy_log_prob
from dovetail.functions.returns import n_step_returns, successor_values
from dovetail.replay.replay import Replay


class Acted(NamedTuple):
    """What acting leaves in the trajectory beside the action."""

    taken: jax.Array
    """The value of the action taken."""
    best: jax.Array
    """The highest value of an action."""
    log_prob: jax.Array


@dataclass(frozen=True)
class ApeX(Laddered):
    """DQN with many actors that explore differently and judge what they insert."""

    n_step: int = 3
    """Steps whose rewards are taken as they were before a value stands for the rest."""
    dueling: bool = True
    """Whether a state's value and the actions' advantages are apart,
    https://arxiv.org/abs/1511.06581."""

    def act(
        self, params: Acting, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[jax.Array, Acted, Carry]:
        """Epsilon-greedy, with the values that were acted on."""
        values, epsilon = self._now(params, timestep), self.epsilon(params, timestep)
        action = epsilon_greedy(key, values, epsilon)
        chance = epsilon_greedy_log_prob(values, epsilon, action)
        return action, Acted(values[action], values.max(), chance), carry

    def value(self, params: Acting, carry: Carry, timestep: Timestep) -> jax.Array:
        """The value of what `timestep` shows."""
        return self._now(params, timestep).max()

    def priorities(self, steps: Trajectory) -> jax.Array:
        """How wrong the values were on which actors acted [T, B]; where the trajectory ends, by as
        many steps as there are."""
        ends = steps.terminated, steps.truncated
        following = successor_values(steps.extras.best, steps.bootstrap, *ends)
        returns = n_step_returns(steps.reward, following, *ends, self.discount, self.n_step)
        return jnp.abs(returns - steps.extras.taken) + LEAST_PRIORITY

    def iteration(self, rl: RL, state: LearnerState) -> tuple[LearnerState, Metrics]:
        """Actors insert what they did and how surprising it was; the learner samples it."""
        assert isinstance(state.replay, Replay)  # somebody always acts
        params = rl.broadcast(self.acting(state))
        steps = rl.unroll(self.act, params, self.unroll_length, bootstrap=self.value)
        rows, final = self.rows(steps)
        replay = rl.insert(state.replay, steps, rows, final, self.priorities(steps))
        return self.replayed(rl, state, replay)
