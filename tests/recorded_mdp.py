"""The small Markov decision process as a dataset."""

from pathlib import Path

import numpy as np
from gymnasium import spaces
from small_mdp import BEHAVIOR, Lived

from dovetail.data import Episode, Metadata, Source, Writer


def recorded(folder: Path, lived: Lived, known: bool = True) -> Path:
    """The episodes of a small MDP as a dataset; a state is shown as one of two numbers."""
    infos = ("version", "log_probability")
    metadata = Metadata(
        spaces.Discrete(2),
        spaces.Discrete(2),
        "test:MDP",
        sources=(Source("test:MDP"),),
        infos=infos,
    )
    with Writer(folder, metadata) as writer:
        for row, length in enumerate(lived.lengths.astype(int).tolist()):
            seen, done = lived.states[row, :length], lived.actions[row, :length]
            ends = np.arange(length) == length - 1
            chances = BEHAVIOR[seen, done]
            writer.write(
                Episode(
                    observations=np.append(seen, 0),
                    actions=done,
                    rewards=lived.rewards[row, :length],
                    terminations=ends,
                    truncations=ends & False,
                    infos={"log_probability": np.log(chances)} if known else {},
                )
            )
    return folder
