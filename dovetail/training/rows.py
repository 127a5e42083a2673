"""The rows of metrics: means over updates, and over the last episodes.

A run reports several times a second, and writes about `ROWS` rows at regular steps, so that equal
runs have equal rows on a fast and on a slow machine.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.run.interval import Interval

ROWS = 250
"""Number of rows that a run writes; fewer if it has fewer updates."""
EPISODES = 100
"""Returns and lengths are averaged over the last episodes, this many or a few more."""
LONGEST = 1000
"""Maximum number of reports that are averaged."""


def row_interval(steps: int) -> Interval:
    """The interval between two rows of a run of `steps` steps."""
    return Interval(steps=max(1, -(-steps // ROWS)))


def columns(means: Mapping[str, np.ndarray]) -> dict[str, float]:
    """One column per metric: its mean over seeds, and with several seeds one column for each."""
    row: dict[str, float] = {}
    for name, value in means.items():
        row[name] = float(np.mean(value))
        if np.ndim(value):
            row |= {f"{name}/seed{i}": float(x) for i, x in enumerate(value)}
    return row


class PendingRow:
    """Joins the rows of several reports into the next row to write."""

    def __init__(self) -> None:
        self._row: dict[str, float] = {}
        self._sums: dict[str, tuple[float, int]] = {}
        """Sums of means, each weighted with its updates, and the number of updates."""

    def add(self, row: Mapping[str, float], averaged: Mapping[str, float], iterations: int) -> None:
        """Adds the row of a report; `averaged` are its means over `iterations` updates."""
        episodes = self._row.get("episodes", 0.0) + row.get("episodes", 0.0)
        for name, mean in averaged.items():
            total, weight = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + mean * iterations, weight + iterations
        self._row |= row
        if "episodes" in row:
            self._row["episodes"] = episodes

    def __bool__(self) -> bool:
        return bool(self._row)

    def take(self) -> dict[str, float]:
        """Returns the row and begins the next; empty if nothing was added."""
        row = self._row | {name: total / weight for name, (total, weight) in self._sums.items()}
        self._row, self._sums = {}, {}
        return row


class RecentEpisodes:
    """Means over the last episodes: over the newest reports that together have `EPISODES`."""

    def __init__(self, info: Sequence[str] = ()) -> None:
        """`info` names the logged values of the environments' `info`."""
        self._info = tuple(info)
        self.unseen = set(info)
        """The names that no environment's `info` has had so far."""
        self._reports: deque[np.ndarray] = deque(maxlen=LONGEST)

    def add(self, episodes: Sequence[Any]) -> dict[str, np.ndarray]:
        """Adds a report's episodes; returns the means of its logged values over steps.

        `episodes` as in `Report.episodes`. With several seeds, every value has one entry for each.
        """
        sums: list[np.ndarray] = [np.asarray(x).sum(axis=-1) for x in episodes[:3]]
        found: dict[str, np.ndarray] = {}
        if self._info:
            values = np.moveaxis(np.asarray(episodes[3]).sum(axis=-2), -1, 0)  # [4 K], [4 K, seeds]
            totals, counts, finals, ends = np.split(values, 4)
            found = self._means("info_{}", totals, counts)
            sums += [*finals, *ends]
            known = (np.any(n) or np.any(m) for n, m in zip(counts, ends, strict=True))
            self.unseen -= {key for key, seen in zip(self._info, known, strict=True) if seen}
        if np.any(sums[0]):
            self._reports.append(np.stack([np.asarray(x, np.float64) for x in sums]))
            self._forget()
        return found

    def means(self) -> dict[str, np.ndarray]:
        """The means over the last episodes; empty until every seed has finished one."""
        total: Any = np.sum(self._reports, axis=0) if self._reports else np.zeros(1)
        if not np.all(total[0]):
            return {}
        number, returns, lengths, *info = total
        found = {"episode_return": returns / number, "episode_length": lengths / number}
        size = len(self._info)
        return found | self._means("info_{}_final", info[:size], info[size:])

    def mean_return(self) -> float | None:
        """Mean return of the last episodes, over all seeds; None without any."""
        found = self.means().get("episode_return")
        return None if found is None else float(np.mean(found))

    def _means(
        self, name: str, totals: Iterable[np.ndarray], counts: Iterable[np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The means of the values of `info` that appeared in every seed."""
        found = zip(self._info, totals, counts, strict=True)
        return {name.format(key): total / n for key, total, n in found if np.all(n)}

    def _forget(self) -> None:
        """Drops the oldest reports as long as the others have enough episodes."""
        left = np.sum([report[0] for report in self._reports], axis=0)
        while np.min(left - self._reports[0][0]) >= EPISODES:
            left = left - self._reports.popleft()[0]


def unseen_text(keys: Iterable[str]) -> str:
    """The warning about keys of --log-info that never appeared."""
    named = ", ".join(sorted(keys))
    return f"--log-info: no environment has reported {named} in its info, so it is not logged."


def info_text(row: Mapping[str, float], keys: Sequence[str]) -> str | None:
    """The logged values of `info` for the display; None without any.

    The value at the end of episodes is shown where there is one.
    """
    named = {key: row.get(f"info_{key}_final", row.get(f"info_{key}")) for key in keys}
    shown = [f"{key} {value:.4g}" for key, value in named.items() if value is not None]
    return " · ".join(shown) or None
