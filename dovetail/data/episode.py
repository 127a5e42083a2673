"""The contents of a dataset: episodes, the rows they are read as, and their sources."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dovetail.errors import UserError

Array = np.ndarray[Any, np.dtype[Any]]

LOG_PROBABILITY = "log_probability"
"""Of the action under the policy that chose it; NaN where unknown."""
VERSION = "version"
"""Number of updates the policy had seen; -1 where unknown."""
SAMPLED_ACTION = "sampled_action"
"""The policy's action before it was clipped to the bounds of the action space."""


@dataclass(frozen=True)
class Episode:
    """One episode, in the environment's own observations and actions."""

    observations: Any
    """A tree of arrays [steps + 1, …]; the last row is the true final observation."""
    actions: Any
    """[steps, …]"""
    rewards: Array
    terminations: Array
    truncations: Array
    infos: dict[str, Array] = field(default_factory=dict[str, Array])
    """`log_probability`, `version`, `sampled_action`, each [steps, …], where known."""
    source: int = 0
    """Index into the dataset's sources."""
    cut: bool = False
    """Whether only the recording ended here; the last step is marked as truncated."""
    begun: bool = True
    """Whether it was recorded from its first step."""

    def __len__(self) -> int:
        return len(self.rewards)


@dataclass(frozen=True)
class Source:
    """The origin of episodes."""

    environment: str
    """The environment's id."""
    kind: str = "other"
    """"training", "evaluation", or another word."""
    run: str | None = None
    """The run's folder."""
    algorithm: str | None = None
    seed: int | None = None
    dovetail: str | None = None
    """The Dovetail version that recorded them."""


class Rows(NamedTuple):
    """Consecutive episodes as algorithms see them: leaves [n, …], with one extra row after the last
    step of each, which holds the final observation and is otherwise undefined."""

    observation: Any
    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    log_probability: Any
    """NaN where unknown."""
    version: Any
    """-1 where unknown."""
    last: Any
    """Whether a row is such an extra row."""


def check_lengths(
    episode: Episode, observations: dict[str, Array], others: dict[str, Array]
) -> None:
    """Raises if an episode's arrays do not fit together."""
    steps = len(episode.rewards)
    if steps == 0:
        raise UserError("An episode without a step was given to be written: leave it out.")
    for path, array in observations.items():
        if len(array) != steps + 1:
            raise UserError(
                f"An episode of {steps} steps has {len(array)} {path}: give {steps + 1}, the last "
                "one included."
            )
    for path, array in others.items():
        if len(array) != steps:
            raise UserError(f"An episode of {steps} steps has {len(array)} {path}: give {steps}.")
    ends = np.asarray(episode.terminations) | np.asarray(episode.truncations)
    if ends[:-1].any():
        raise UserError(
            f"An episode of {steps} steps ends at step {int(ends.argmax())} already: give each "
            "episode by itself."
        )
    if not ends[-1]:
        raise UserError(
            f"An episode of {steps} steps neither terminates nor is truncated at its last step: "
            "mark it as truncated if only the recording ended there."
        )
