"""A small Markov decision process whose values are known exactly.

Two states and an end; two actions. Episodes begin in state 0 or 1 with equal chances.
"""

from typing import NamedTuple

import numpy as np

DISCOUNT = 0.9
NEXT = np.array(  # P(next | state, action); the third is the end
    [[[0.7, 0.1, 0.2], [0.1, 0.6, 0.3]], [[0.3, 0.3, 0.4], [0.5, 0.3, 0.2]]]
)
REWARD = np.array([[1.0, 0.0], [-0.5, 2.0]])
BEHAVIOR = np.array([[0.6, 0.4], [0.5, 0.5]])
TARGET = np.array([[0.4, 0.6], [0.35, 0.65]])
LONGEST = 60


class Lived(NamedTuple):
    """Episodes, [episodes, LONGEST]; -1 behind an episode's end."""

    states: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    lengths: np.ndarray


def action_values(policy: np.ndarray) -> np.ndarray:
    """q(s, a), exactly."""
    inner = NEXT[:, :, :2]
    reach = np.einsum("sat,tb->satb", inner, policy).reshape(4, 4)
    return np.linalg.solve(np.eye(4) - DISCOUNT * reach, REWARD.reshape(4)).reshape(2, 2)


def value(policy: np.ndarray) -> float:
    """The mean value of the states that episodes begin in."""
    return float((policy * action_values(policy)).sum(axis=1).mean())


def live(policy: np.ndarray, episodes: int, seed: int) -> Lived:
    """Episodes of a policy; each ends by itself well before LONGEST, but for a chance of 1e-6."""
    rng = np.random.default_rng(seed)
    shape = (episodes, LONGEST)
    found = Lived(-np.ones(shape, int), -np.ones(shape, int), np.zeros(shape), np.zeros(episodes))
    state = rng.integers(2, size=episodes)
    alive = np.ones(episodes, bool)
    for t in range(LONGEST):
        action = (rng.random(episodes) >= policy[state, 0]).astype(int)
        found.states[alive, t], found.actions[alive, t] = state[alive], action[alive]
        found.rewards[alive, t] = REWARD[state, action][alive]
        found.lengths[alive] = t + 1
        following = (rng.random(episodes)[:, None] >= NEXT[state, action].cumsum(axis=1)).sum(
            axis=1
        )
        alive &= following < 2
        state = np.where(alive, following, state)
    return found


def ratios(lived: Lived, target: np.ndarray, behavior: np.ndarray) -> np.ndarray:
    """target / behavior of the actions; 1 behind the end."""
    found = target[lived.states, lived.actions] / behavior[lived.states, lived.actions]
    return np.where(lived.states >= 0, found, 1.0)
