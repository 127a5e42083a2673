"""Summary statistics of a dataset, read in one pass; optionally checks all of it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.data.blocks import last_rows
from dovetail.data.hdf5 import Array
from dovetail.data.reader import Reader
from dovetail.data.spaces import leaves
from dovetail.data.writer import Tell


@dataclass(frozen=True)
class Spread:
    """Mean, standard deviation and extremes."""

    mean: float
    deviation: float
    low: float
    high: float

    @classmethod
    def of(cls, x: Array) -> "Spread":
        """The spread of an array."""
        return cls(float(x.mean()), float(x.std()), float(x.min()), float(x.max()))


@dataclass(frozen=True)
class Summary:
    """The contents of a dataset."""

    dataset: str
    format: str
    environment: str
    episodes: int
    steps: int
    megabytes: float
    observation: str
    action: str
    returns: Spread | None
    """Of whole episodes; None if there are none."""
    lengths: Spread
    terminated: int
    """Number of episodes that terminated."""
    truncated: int
    """Number of episodes that were truncated."""
    cut: int
    """Number of truncated episodes that only the end of the recording cut."""
    not_begun: int
    """Number of episodes not recorded from their first step."""
    fragments: int
    """Number of episodes that were cut or not begun; their returns are excluded."""
    log_probabilities: float
    """Fraction of steps with a recorded log-probability."""
    versions: tuple[int, int] | None
    """Oldest and newest policy version; None if unknown."""
    sources: list[dict[str, Any]]
    checked: bool
    """Whether all of it was read and found intact, with finite numbers and valid choices."""

    def described(self) -> dict[str, Any]:
        """As a dict, for JSON."""
        return asdict(self)


def info(dataset: str | Path, *, check: bool = False, tell: Tell | None = None) -> Summary:
    """Summarizes a dataset; with `check`, reads all of it and raises if anything is wrong."""
    with Reader(dataset) as reader:
        metadata, lengths = reader.metadata, reader.episodes.lengths
        names = ["rewards", "terminations"]
        names += [f"infos/{n}" for n in ("log_probability", "version") if n in metadata.infos]
        returns = np.zeros(reader.num_episodes)
        terminated = known = 0
        versions: list[int] = []
        for pieces, rows in reader.through(() if check else names):
            if tell is not None:
                tell(pieces[0].episode, reader.num_episodes)
            numbers = np.repeat([p.episode for p in pieces], [p.stop - p.start for p in pieces])
            np.add.at(returns, numbers, rows["rewards"])
            terminated += int(rows["terminations"].sum())
            step = np.ones(len(rows["rewards"]), np.bool_)
            # The extra row after an episode is not a step.
            step[last_rows(pieces, lengths)] = False
            if "infos/log_probability" in rows:
                known += int((~np.isnan(rows["infos/log_probability"][step])).sum())
            if "infos/version" in rows:
                found = rows["infos/version"][step]
                found = found[found >= 0]
                versions += [int(found.min()), int(found.max())] if len(found) else []
        files = (file for file in (reader.folder / "data").rglob("*") if file.is_file())
        episodes = reader.episodes
        counted = returns[episodes.whole]
        return Summary(
            dataset=str(reader.folder),
            format="minari" if metadata.data_format == "hdf5" else "parquet",
            environment=metadata.environment,
            episodes=reader.num_episodes,
            steps=reader.num_steps,
            megabytes=round(sum(file.stat().st_size for file in files) / 1e6, 3),
            observation=_words(list(leaves(metadata.observation, "observations"))),
            action=_words(list(leaves(metadata.action, "actions"))),
            returns=Spread.of(counted) if len(counted) else None,
            lengths=Spread.of(lengths),
            terminated=terminated,
            truncated=reader.num_episodes - terminated,
            cut=int(episodes.cut.sum()),
            not_begun=int((~episodes.begun).sum()),
            fragments=reader.num_episodes - len(counted),
            log_probabilities=known / max(reader.num_steps, 1),
            versions=(min(versions), max(versions)) if versions else None,
            sources=[asdict(source) for source in metadata.sources],
            checked=check,
        )


def _words(parts: list[tuple[str, Any]]) -> str:
    if len(parts) == 1:
        return str(parts[0][1])
    return ", ".join(f"{path.partition('/')[2]}: {space}" for path, space in parts)
