"""Datasets as Parquet tables, for any tool that reads tables.

One row per observation: `episode`, `step`, `observations…`, `actions…`, `rewards`, `terminations`,
`truncations` and optional infos. The row after an episode's last step holds its final observation,
and nulls. A row group holds whole episodes; an array is a list of fixed size. The files are
`data/part-00000.parquet`, …; the spaces are in `data/metadata.json`.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.data.extras import package
from dovetail.data.hdf5 import Array, EpisodeColumns, Piece, Stored
from dovetail.data.metadata import TABLE, Metadata
from dovetail.data.spaces import Column
from dovetail.errors import UserError
from dovetail.run.folder import sync

GROUP_BYTES = 1 << 24
"""Approximate bytes per row group, the unit of reading."""
FILE_GROUPS = 32
"""Row groups per file."""
PER_EPISODE = ("source", "cut", "begun")
"""Columns that are constant within an episode."""


def write_parquet(folder: Path, metadata: Metadata, episodes: Iterable[Stored]) -> Metadata:
    """Writes the tables into `folder`/data; returns the updated metadata."""
    pq = package("pyarrow.parquet")
    place = folder / "data"
    files: dict[str, int] = {}
    counts = [0, 0]
    writer: Any = None
    temporary = place / "part.part"

    def finish_file() -> None:
        nonlocal writer
        if writer is not None:
            writer.close()
            sync(temporary)
            name = f"part-{len(files):05d}.parquet"
            # Renamed when complete: a file with its name is never half-written.
            os.replace(temporary, place / name)
            files[name] = (place / name).stat().st_size
            writer = None

    place.mkdir(parents=True, exist_ok=True)
    for groups, (first, batch) in enumerate(_grouped(episodes, metadata.row_bytes), 1):
        table = _table(metadata, first, batch)
        if writer is None:
            # Parquet's own check sums: `read` verifies them.
            writer = pq.ParquetWriter(temporary, table.schema, write_page_checksum=True)
        writer.write_table(table, row_group_size=table.num_rows)
        counts[0] += len(batch)
        counts[1] += sum(len(one.arrays["rewards"]) for one in batch)
        if groups % FILE_GROUPS == 0:
            finish_file()
    finish_file()
    return replace(
        metadata,
        data_format=TABLE,
        episodes=counts[0],
        steps=counts[1],
        files=files,
        size=None,
        jpeg=False,
    )


def _grouped(episodes: Iterable[Stored], row_bytes: int) -> Iterator[tuple[int, list[Stored]]]:
    """The episodes of each row group, with the number of the first."""
    batch: list[Stored] = []
    first = rows = 0
    for number, episode in enumerate(episodes):
        batch.append(episode)
        rows += len(episode.arrays["rewards"]) + 1
        if rows * max(row_bytes, 1) >= GROUP_BYTES:
            yield first, batch
            batch, first, rows = [], number + 1, 0
    if batch:
        yield first, batch


def _table(metadata: Metadata, first: int, batch: list[Stored]) -> Any:
    pa = package("pyarrow")
    steps = [len(one.arrays["rewards"]) for one in batch]
    total = sum(steps) + len(batch)
    numbers = np.repeat(np.arange(first, first + len(batch)), [n + 1 for n in steps])
    within = np.concatenate([np.arange(n + 1) for n in steps])
    last = np.zeros(total, np.bool_)
    last[np.cumsum([n + 1 for n in steps]) - 1] = True
    found: dict[str, Any] = {
        "episode": pa.array(numbers.astype(np.int64)),
        "step": pa.array(within.astype(np.int32)),
    }
    for column in metadata.observation_columns:
        rows = np.concatenate([one.arrays[column.path] for one in batch])
        found[column.path] = _arrow(column, rows, None)
    for column in metadata.step_columns:
        rows = np.zeros((total, *column.shape), column.dtype)
        # The row after the last step has no action and no reward.
        rows[~last] = np.concatenate([one.arrays[column.path] for one in batch])
        found[column.path] = _arrow(column, rows, last)
    for name in PER_EPISODE:
        values = np.array([getattr(one, name) for one in batch])
        found[name] = pa.array(np.repeat(values, [n + 1 for n in steps]))
    return pa.table(found)


def _arrow(column: Column, rows: Array, null: Array | None) -> Any:
    """Rows as an Arrow array; rows marked in `null` become null."""
    pa = package("pyarrow")
    if not column.shape:
        return pa.array(rows, mask=null)
    kind = pa.from_numpy_dtype(column.dtype)
    size = column.row_bytes // column.dtype.itemsize
    mask = None if null is None else pa.array(null)
    return pa.FixedSizeListArray.from_arrays(
        pa.array(rows.reshape(-1), kind), type=pa.list_(kind, size), mask=mask
    )


class Tables:
    """The tables of a Parquet dataset; caches the row group that was read last."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self._place, self._metadata = folder / "data", metadata
        self._files = [self._open(name) for name in sorted(metadata.files)]
        self._groups = [
            (number, group)
            for number, file in enumerate(self._files)
            for group in range(file.num_row_groups)
        ]
        if not self._groups:
            raise UserError(
                f"{self._place} has no table with a row, but its metadata.json says "
                f"{metadata.episodes} episodes: take both from a copy of the dataset."
            )
        counts = [self._index(*group) for group in self._groups]
        self.episodes = EpisodeColumns(
            *(np.concatenate(column) for column in zip(*counts, strict=True))
        )
        self._first = np.cumsum([0, *(len(count[0]) for count in counts)])
        self._kept: tuple[int, dict[str, Array]] | None = None
        if len(self.episodes.lengths) != metadata.episodes:
            raise UserError(
                f"{self._place} holds {len(self.episodes.lengths)} episodes, but its metadata.json "
                f"says {metadata.episodes}: a file is missing or another's."
            )

    def _open(self, name: str) -> Any:
        """Opens one file; raises if it is missing, of another size, or damaged."""
        pq = package("pyarrow.parquet")
        path = self._place / name
        if not path.exists():
            raise UserError(f"{path} is missing: take it from a copy of the dataset.")
        size, expected = path.stat().st_size, self._metadata.files[name]
        if size != expected:
            raise UserError(
                f"{path} is damaged: it has {size:,} bytes, and {expected:,} were written; take it "
                "from a copy of the dataset."
            )
        try:
            return pq.ParquetFile(path, page_checksum_verification=True)
        except Exception as error:
            raise self._damaged(path, error) from error

    def _index(self, number: int, group: int) -> EpisodeColumns:
        """The episodes of a row group; tables without a `begun` column hold whole episodes."""
        older = "begun" not in self._files[number].schema_arrow.names
        told = [name for name in PER_EPISODE if not (older and name == "begun")]
        table = self._table(number, group, ["step", *told])
        step = table["step"].to_numpy()
        begins = np.flatnonzero(step == 0)
        lengths = np.diff(np.append(begins, len(step))) - 1
        known = {name: table[name].to_numpy()[begins] for name in table.column_names}
        begun = known.get("begun", np.ones(len(begins), np.bool_))
        return EpisodeColumns(
            lengths.astype(np.int64),
            known["source"].astype(np.int32),
            known["cut"].astype(np.bool_),
            begun.astype(np.bool_),
        )

    def _table(self, number: int, group: int, names: list[str]) -> Any:
        try:
            table = self._files[number].read_row_group(group, columns=names)
            return table.select(names)  # raises for missing columns
        except Exception as error:
            raise self._damaged(self._path(number), error) from error

    def _path(self, number: int) -> Path:
        return self._place / sorted(self._metadata.files)[number]

    def _damaged(self, path: Path, error: Exception) -> UserError:
        what = " ".join(str(error).split())[:200]
        return UserError(f"{path} is damaged ({what}): take it from a copy of the dataset.")

    def _rows(self, group: int) -> dict[str, Array]:
        """All columns of a row group."""
        # Pieces are usually read in order, so one row group in memory is enough.
        if self._kept is None or self._kept[0] != group:
            columns, place = self._metadata.columns, self._groups[group]
            table = self._table(*place, [column.path for column in columns])
            try:
                self._kept = (group, {c.path: _numpy(c, table[c.path]) for c in columns})
            except Exception as error:  # arrays that do not match the spaces
                raise self._damaged(self._path(place[0]), error) from error
        return self._kept[1]

    def read(self, pieces: Sequence[Piece], only: Sequence[str] = ()) -> dict[str, Array]:
        """The columns of the pieces."""
        names = only or [column.path for column in self._metadata.columns]
        parts: list[dict[str, Array]] = []
        for piece in pieces:
            group = int(np.searchsorted(self._first, piece.episode, side="right")) - 1
            before = self.episodes.lengths[self._first[group] : piece.episode]
            at = int(before.sum()) + len(before)
            rows = self._rows(group)
            parts.append({p: rows[p][at + piece.start : at + piece.stop] for p in names})
        return {name: np.concatenate([part[name] for part in parts]) for name in names}

    def verify(self, episode: int) -> None:
        """Does nothing: every page's check sum is verified when it is read."""

    def unread(self) -> list[str]:
        """Nothing: Dovetail writes no other contents."""
        return []

    def close(self) -> None:
        """Closes the files; safe to call twice."""
        for file in self._files:
            file.close()


def _numpy(column: Column, chunked: Any) -> Array:
    """A column's rows; zeros where null."""
    array = chunked.combine_chunks()
    if not column.shape:
        zero = False if column.dtype == np.bool_ else 0
        return array.fill_null(zero).to_numpy(zero_copy_only=False).astype(column.dtype)
    size = column.row_bytes // column.dtype.itemsize
    null = array.is_null().to_numpy(zero_copy_only=False)
    rows = np.zeros((len(array), size), column.dtype)
    rows[~null] = array.drop_null().flatten().to_numpy(zero_copy_only=False).reshape(-1, size)
    return rows.reshape(-1, *column.shape)
