"""Writes a dataset: a journal while it grows, Minari's layout once it is closed.

Each episode is appended to the journal as one record with a check sum, and from then on survives a
crash of the process. Closing converts the journal into the HDF5 file and then `metadata.json`, and
removes it once both are on disk. So a folder is either a complete dataset or has a journal;
`repair` finishes a recording after a killed process or a full disk.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np

from dovetail.data.episode import Episode, Source, check_lengths
from dovetail.data.extras import package
from dovetail.data.hdf5 import Stored, unknown, write_hdf5
from dovetail.data.journal import append, entries
from dovetail.data.metadata import FORMAT, JOURNAL, TABLE, Metadata
from dovetail.data.parquet import write_parquet
from dovetail.data.spaces import Column, flatten, from_json, to_json
from dovetail.errors import UserError
from dovetail.replay.storage.records import Reading, RecordFile
from dovetail.run.folder import make_new, sync

Array = np.ndarray[Any, np.dtype[Any]]
Tell = Callable[[int, int], None]
"""Progress callback: (episodes done, episodes in total)."""
MOST_BYTES = (1 << 32) - 1
"""Maximum bytes of one column of an episode; the journal stores lengths in 32 bits."""


class Writer:
    """Writes episodes into a new dataset; a context manager that closes it.

    After an exception the journal stays in place with all episodes so far.
    """

    def __init__(self, folder: str | Path, metadata: Metadata) -> None:
        """`folder` is new or empty; `metadata` describes the dataset, except for its counts."""
        self.folder = Path(folder)
        self.metadata = metadata
        self.episodes = 0
        self.steps = 0
        package(
            "pyarrow.parquet" if metadata.data_format == TABLE else "h5py"
        )  # fail now, not at the end
        make_new(self.folder, "dataset")
        self._journal: RecordFile | None = RecordFile(self.folder / JOURNAL)
        append(self._journal, {"dataset": _described(metadata)}, {})

    def write(self, episode: Episode) -> None:
        """Appends one episode."""
        assert self._journal is not None, "the dataset is closed"
        if not 0 <= episode.source < len(self.metadata.sources):
            raise UserError(
                f"An episode names source {episode.source}, but the dataset has "
                f"{len(self.metadata.sources)}: give the sources when the dataset is made."
            )
        arrays = self._arrays(episode)
        told = {"source": episode.source, "cut": episode.cut, "begun": episode.begun}
        append(self._journal, told, arrays)
        self.episodes += 1
        self.steps += len(episode)

    def _arrays(self, episode: Episode) -> dict[str, Array]:
        """The episode's columns, checked against the spaces."""
        metadata = self.metadata
        try:
            observed = flatten(metadata.observation, episode.observations, "observations")
            taken = flatten(metadata.action, episode.actions, "actions")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(
                f"An episode's observations or actions do not have the structure of the dataset's "
                f"spaces, {metadata.observation} and {metadata.action} ({error})."
            ) from error
        steps = len(episode)
        others = taken | {
            "rewards": np.asarray(episode.rewards, np.float32),
            "terminations": np.asarray(episode.terminations, np.bool_),
            "truncations": np.asarray(episode.truncations, np.bool_),
        }
        for column in metadata.step_columns:
            name = column.path.removeprefix("infos/")
            if name != column.path:
                found = episode.infos.get(name)
                others[column.path] = (
                    np.full((steps, *column.shape), unknown(column), column.dtype)
                    if found is None
                    else np.asarray(found, column.dtype)
                )
        check_lengths(episode, observed, others)
        arrays = observed | others
        _check_shapes(arrays, metadata.columns)
        return arrays

    def close(self, tell: Tell | None = None) -> None:
        """Converts the journal into a dataset; refuses to make an empty one."""
        if self._journal is None:
            return
        journal, self._journal = self._journal, None
        # On disk before the conversion, which may fail for lack of room.
        journal.sync()
        journal.close()
        if self.episodes == 0:
            self._remove()
            raise UserError(f"No episode was written to {self.folder}: it would be empty.")
        finish(self.folder, tell)

    def abandon(self) -> None:
        """Leaves the journal for `repair`; removes it if it has no episode."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None
            if self.episodes == 0:
                self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            (self.folder / JOURNAL).unlink()
            self.folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()


def repair(folder: str | Path, tell: Tell | None = None) -> tuple[Metadata, str | None]:
    """Finishes a recording that was not closed: (its metadata, what was lost or None)."""
    path = Path(folder)
    if not (path / JOURNAL).exists():
        raise UserError(f"{path} has no {JOURNAL}: there is nothing to repair.")
    return finish(path, tell)


def finish(folder: Path, tell: Tell | None = None) -> tuple[Metadata, str | None]:
    """Converts the journal in `folder` into a dataset, and removes it."""
    journal = folder / JOURNAL
    total, lost = _count(journal)
    if total < 1:
        raise UserError(
            f"{journal} holds no whole episode ({lost or 'none was finished'}): there is nothing "
            f"to save; remove {folder} and record again."
        )
    reading = entries(Reading(journal))
    metadata = _undescribed(next(reading).header["dataset"])

    def episodes() -> Iterator[Stored]:
        for number, record in enumerate(reading):
            if tell is not None:
                tell(number, total)
            told = record.header
            # `begun` came later: journals of earlier versions lack it.
            yield Stored(record.arrays, told["source"], told["cut"], told.get("begun", True))

    write = write_parquet if metadata.data_format == TABLE else write_hdf5
    try:
        metadata = write(folder, metadata, episodes())
        # Last, because its presence marks the dataset as complete.
        metadata.write(folder)
        sync(folder)
        journal.unlink()
    except (OSError, UserError) as error:
        # The journal still has everything: remove the partial files, so that `repair` can try
        # again.
        shutil.rmtree(folder / "data", ignore_errors=True)
        system = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(system, OSError):
            raise
        why = os.strerror(system.errno) if system.errno else " ".join(str(system).split())
        raise UserError(
            f"{folder} could not be finished ({why}): all that was recorded "
            f"is kept in {journal}; make room and finish it with: dovetail data repair {folder}"
        ) from error
    return metadata, lost


def _count(journal: Path) -> tuple[int, str | None]:
    """(number of intact episodes, the damage after them or None)."""
    reading = Reading(journal)
    return sum(1 for _ in reading) - 1, reading.damage


def _check_shapes(arrays: dict[str, Array], columns: list[Column]) -> None:
    """Raises if a column is too large for the journal, or not of the space's shape."""
    for column in columns:
        size = arrays[column.path].nbytes
        if size > MOST_BYTES:
            raise UserError(
                f"An episode has {size:,} bytes of {column.path}, and {MOST_BYTES:,} are the most "
                "that can be recorded: give it in pieces, cut and not begun."
            )
        found = arrays[column.path].shape[1:]
        if found != column.shape:
            raise UserError(
                f"An episode has {column.path} of shape {found}, but the dataset's space says "
                f"{column.shape}."
            )


def _described(metadata: Metadata) -> dict[str, Any]:
    """Everything needed to turn the journal into a dataset."""
    return {
        "format": FORMAT,
        "observation": to_json(metadata.observation),
        "action": to_json(metadata.action),
        "environment": metadata.environment,
        "env_spec": metadata.env_spec,
        "sources": [asdict(source) for source in metadata.sources],
        "infos": metadata.infos,
        "data_format": metadata.data_format,
    }


def _undescribed(record: dict[str, Any]) -> Metadata:
    """Inverse of `_described`."""
    return Metadata(
        observation=from_json(record["observation"]),
        action=from_json(record["action"]),
        environment=record["environment"],
        env_spec=record["env_spec"],
        sources=tuple(Source(**source) for source in record["sources"]),
        infos=tuple(record["infos"]),
        data_format=record["data_format"],
    )
