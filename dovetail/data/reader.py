"""Reads a dataset: any episode, any steps of it, any range of rows; never all of it at once."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from dovetail.data.blocks import grouped, last_rows
from dovetail.data.episode import LOG_PROBABILITY, SAMPLED_ACTION, VERSION, Episode, Rows
from dovetail.data.hdf5 import Array, EpisodeColumns, Piece, Storage, open_hdf5
from dovetail.data.metadata import TABLE, read_metadata
from dovetail.data.parquet import Tables
from dovetail.data.spaces import Codec, unflatten
from dovetail.data.values import check_values
from dovetail.envs.interface import EnvSpec
from dovetail.errors import UserError

READ_BYTES = 1 << 24
"""Maximum bytes per read, unless a single row is larger."""


class Reader:
    """A dataset opened for reading."""

    def __init__(self, folder: str | Path) -> None:
        """Opens the dataset; raises if it is missing, half-written or damaged."""
        self.folder = Path(folder)
        self.metadata = read_metadata(self.folder)
        if self.metadata.episodes < 1:
            raise UserError(f"The dataset {self.folder} is empty: it has no episode.")
        self.storage: Storage = (
            Tables(self.folder, self.metadata)
            if self.metadata.data_format == TABLE
            else open_hdf5(self.folder, self.metadata)
        )
        name = self.metadata.environment or str(self.folder)
        self.codec = Codec(self.metadata.observation, self.metadata.action, name)

    @property
    def episodes(self) -> EpisodeColumns:
        """Length and source of every episode, and whether it was cut and whether it was recorded
        from its first step."""
        return self.storage.episodes

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self.episodes.lengths)

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return int(self.episodes.lengths.sum())

    @property
    def spec(self) -> EnvSpec:
        """The environment as algorithms see it, as far as the dataset describes it."""
        name = self.metadata.environment or f"dataset:{self.folder.name}"
        codec = self.codec
        own = self.metadata.observation, self.metadata.action
        return EnvSpec(name, codec.observation, codec.action, bounds=codec.bounds, spaces=own)

    @property
    def has_log_probabilities(self) -> bool:
        """Whether the log-probabilities of at least some actions were recorded."""
        return LOG_PROBABILITY in self.metadata.infos

    def episode(self, number: int) -> Episode:
        """One episode, in the environment's own observations and actions."""
        steps = int(self.episodes.lengths[number])
        arrays = self.storage.read([Piece(number, 0, steps + 1)])
        infos = {name: arrays[f"infos/{name}"][:-1] for name in self.metadata.infos}
        actions = unflatten(self.metadata.action, arrays, "actions")
        return Episode(
            observations=unflatten(self.metadata.observation, arrays, "observations"),
            actions=jax.tree.map(lambda x: x[:-1], actions),
            rewards=arrays["rewards"][:-1],
            terminations=arrays["terminations"][:-1],
            truncations=arrays["truncations"][:-1],
            infos=infos,
            source=int(self.episodes.sources[number]),
            cut=bool(self.episodes.cut[number]),
            begun=bool(self.episodes.begun[number]),
        )

    def __iter__(self) -> Iterator[Episode]:
        """All episodes in order."""
        return (self.episode(number) for number in range(self.num_episodes))

    def pieces(self, pieces: Sequence[Piece]) -> Rows:
        """The rows of these pieces, concatenated, as algorithms see them."""
        arrays = self.storage.read(pieces)
        self.check(arrays, pieces)
        total = len(arrays["rewards"])
        last = np.zeros(total, np.bool_)
        # The row after the last step: it has an observation and no action.
        last[last_rows(pieces, self.episodes.lengths)] = True
        info = {name: arrays[f"infos/{name}"] for name in self.metadata.infos}
        # Rows have the same leaves for every dataset; missing infos are filled in.
        unsaid = {LOG_PROBABILITY: np.float32(np.nan), VERSION: np.int32(-1)}
        for name, value in unsaid.items():
            info.setdefault(name, np.broadcast_to(value, total))
        return Rows(
            observation=self.codec.observations(
                unflatten(self.metadata.observation, arrays, "observations")
            ),
            action=self._given(arrays, info.get(SAMPLED_ACTION)),
            reward=arrays["rewards"],
            terminated=arrays["terminations"],
            truncated=arrays["truncations"],
            log_probability=info[LOG_PROBABILITY],
            version=info[VERSION],
            last=last,
        )

    def parts(self, pieces: Iterable[Piece], rows: int) -> Iterator[list[Piece]]:
        """Groups of pieces with at most `rows` rows, to be read one after another. An episode too
        long for one group is verified against its check sum first."""

        def verified() -> Iterator[Piece]:
            for piece in pieces:
                whole = piece.start == 0 and piece.stop > self.episodes.lengths[piece.episode]
                if whole and piece.stop > rows:
                    self.storage.verify(piece.episode)
                yield piece

        return grouped(verified(), rows)

    def through(
        self, only: Sequence[str] = (), memory: int = READ_BYTES
    ) -> Iterator[tuple[list[Piece], dict[str, Array]]]:
        """The whole dataset in order, `memory` bytes at a time: (pieces, columns). All columns are
        checked; with `only`, just those columns are read, unchecked."""
        columns = [c for c in self.metadata.columns if not only or c.path in only]
        rows = max(memory // sum(column.row_bytes for column in columns), 1)
        lengths = self.episodes.lengths.tolist()
        whole = (Piece(number, 0, steps + 1) for number, steps in enumerate(lengths))
        for pieces in grouped(whole, rows) if only else self.parts(whole, rows):
            arrays = self.storage.read(pieces, only)
            if not only:
                self.check(arrays, pieces)
            yield pieces, arrays

    def check(self, arrays: dict[str, Array], pieces: Sequence[Piece]) -> None:
        """Raises if an array read from these pieces has invalid values; names the first."""
        check_values(self.folder, self.metadata, self.episodes.lengths, arrays, pieces)

    def _given(self, arrays: dict[str, Array], sampled: Array | None) -> Array:
        """The action the policy chose, where known; otherwise the one the environment took."""
        taken = self.codec.actions(unflatten(self.metadata.action, arrays, "actions"))
        if sampled is None:
            return taken
        # NaN marks steps without a recorded sample.
        return np.where(np.isnan(sampled), taken, sampled)

    def rows(self, first: int, stop: int) -> Rows:
        """The rows of episodes `first` … `stop` - 1."""
        lengths = self.episodes.lengths[first:stop]
        return self.pieces([Piece(first + i, 0, int(n) + 1) for i, n in enumerate(lengths)])

    def transitions(self, steps: Array) -> tuple[Rows, Any]:
        """(rows, next observations) of the given steps, numbered across all episodes."""
        starts = np.cumsum([0, *self.episodes.lengths])
        numbers = np.searchsorted(starts, steps, side="right") - 1
        within = np.asarray(steps) - starts[numbers]
        pieces = [Piece(int(e), int(t), int(t) + 2) for e, t in zip(numbers, within, strict=True)]
        both = self.pieces(pieces)
        # Each piece has two rows: the step and its successor.
        rows = jax.tree.map(lambda x: x[::2], both)
        return rows, jax.tree.map(lambda x: x[1::2], both.observation)

    def close(self) -> None:
        """Closes the files; safe to call twice."""
        self.storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        self.close()


def check_fits(reader: Reader, spec: EnvSpec) -> None:
    """Raises if a dataset's observations or actions do not match an environment's."""
    found = reader.spec
    if jax.tree.structure(found.observation) != jax.tree.structure(spec.observation) or (
        jax.tree.leaves(found.observation) != jax.tree.leaves(spec.observation)
    ):
        raise UserError(
            f"The dataset {reader.folder} has observations {_shapes(found.observation)}, but "
            f"{spec.id} shows {_shapes(spec.observation)}: give a dataset of this environment."
        )
    if found.action != spec.action:
        raise UserError(
            f"The dataset {reader.folder} has actions {found.action}, but {spec.id} takes "
            f"{spec.action}: give a dataset of this environment."
        )
    if found.bounds is not None and spec.bounds is not None:
        _refuse_other_bounds(reader.folder, np.array(found.bounds), spec.id, np.array(spec.bounds))


def _refuse_other_bounds(folder: Path, own: Array, env_id: str, wanted: Array) -> None:
    """Raises if action bounds [2, size] differ from the environment's: the same number would mean
    two different actions. Entries unbounded on either side are not compared."""
    both = np.isfinite(own) & np.isfinite(wanted)
    other = (both & ~np.isclose(own, wanted, rtol=1e-5, atol=1e-6)).any(axis=0)
    if other.any():
        at = int(other.argmax())
        raise UserError(
            f"The dataset {folder} has actions from {own[0, at]:g} to {own[1, at]:g} (entry {at}), "
            f"but {env_id} takes them from {wanted[0, at]:g} to {wanted[1, at]:g}: give a dataset "
            "of this environment, or an environment with the dataset's bounds."
        )


def _shapes(tree: Any) -> str:
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{name}: {_shapes(part)}" for name, part in tree.items()) + "}"
    return f"{np.dtype(tree.dtype).name}{list(tree.shape)}"
