"""Merges datasets, splits them, and converts their format; episodes stay whole."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dovetail.data.hdf5 import Array, Piece, Stored, unknown, write_hdf5
from dovetail.data.metadata import HDF5, TABLE, Metadata
from dovetail.data.parquet import write_parquet
from dovetail.data.reader import Reader
from dovetail.data.spaces import Space, same
from dovetail.data.writer import Tell
from dovetail.errors import UserError, nearest
from dovetail.run.folder import make_new, write_error

FORMATS = {"minari": HDF5, "parquet": TABLE}


class MadeDataset(NamedTuple):
    """A new dataset."""

    folder: Path
    metadata: Metadata
    dropped: int
    """Number of episodes left out because of invalid values."""
    unread: list[str]
    """Contents of Minari's episodes that were not read, and are missing here."""


def merge(
    datasets: Sequence[str | Path],
    out: str | Path,
    *,
    format: str = "minari",
    drop_invalid: bool = False,
    tell: Tell | None = None,
) -> MadeDataset:
    """All episodes of `datasets`, in order, as a new dataset `out`.

    `drop_invalid` leaves out episodes with observations, actions or rewards that are not finite, or
    with choices outside their space.
    """
    readers = [Reader(folder) for folder in datasets]
    try:
        metadata, shifts = _joined(readers, format)
        dropped: list[int] = []
        keep = [np.ones(reader.num_episodes, np.bool_) for reader in readers]
        episodes = _all(readers, shifts, keep, metadata, dropped if drop_invalid else None)
        total = sum(reader.num_episodes for reader in readers)
        made = _write(Path(out), metadata, _told(episodes, tell, total))
        unread = {name for reader in readers for name in reader.storage.unread()}
        return MadeDataset(Path(out), made, len(dropped), sorted(unread))
    finally:
        for reader in readers:
            reader.close()


def split(
    dataset: str | Path,
    outs: Sequence[str | Path],
    shares: Sequence[float],
    *,
    seed: int = 0,
    tell: Tell | None = None,
) -> list[MadeDataset]:
    """New datasets with these shares of the episodes, assigned at random, order preserved."""
    check_shares(shares, outs)
    with Reader(dataset) as reader:
        parts = _assign(reader.num_episodes, shares, seed)
        counts = [int((parts == part).sum()) for part in range(len(outs))]
        if 0 in counts:
            raise UserError(
                f"{dataset} has {reader.num_episodes} episodes, too few for the shares "
                f"{','.join(f'{share:g}' for share in shares)}: one part would be empty."
            )
        for out in outs:
            make_new(Path(out), "dataset")
        made: list[MadeDataset] = []
        done, unread = 0, reader.storage.unread()
        for part, out in enumerate(outs):
            metadata, shifts = _joined([reader], _format(reader.metadata))
            episodes = _all([reader], shifts, [parts == part], metadata, None)
            told = _told(episodes, tell, reader.num_episodes, done)
            made.append(MadeDataset(Path(out), _write(Path(out), metadata, told), 0, unread))
            done += counts[part]
        return made


def check_shares(shares: Sequence[float], outs: Sequence[str | Path]) -> None:
    """Raises if the shares or folders are invalid."""
    if len(shares) < 2 or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise UserError(
            f"The shares are {','.join(f'{share:g}' for share in shares)}: give two or more above "
            "0 that make 1, as 0.9,0.1."
        )
    if len(outs) != len(shares):
        raise UserError(f"There are {len(shares)} shares, but {len(outs)} folders: give one each.")
    if len({Path(out).resolve() for out in outs}) < len(outs):
        raise UserError("Two parts would go into one folder: give each part a folder of its own.")


def _assign(count: int, shares: Sequence[float], seed: int) -> Array:
    """The part of each episode; sizes are the rounded shares."""
    order = np.random.default_rng(seed).permutation(count)
    # Rounding the cumulative shares makes the parts add up to `count`.
    bounds = np.rint(np.cumsum(shares) * count).astype(np.int64)
    parts = np.empty(count, np.int64)
    parts[order] = np.searchsorted(bounds, np.arange(count), side="right")
    return np.minimum(parts, len(shares) - 1)


def _format(metadata: Metadata) -> str:
    return next(name for name, kind in FORMATS.items() if kind == metadata.data_format)


def _joined(readers: Sequence[Reader], format: str) -> tuple[Metadata, list[int]]:
    """The metadata of the new dataset, and the offset of each reader's sources."""
    if format not in FORMATS:
        raise UserError(f"There is no format {format!r}: {nearest(format, FORMATS)}")
    first = readers[0].metadata
    shifts: list[int] = []
    sources = infos = ()
    for reader in readers:
        metadata = reader.metadata
        _refuse_other(reader, readers[0], "observations", metadata.observation, first.observation)
        _refuse_other(reader, readers[0], "actions", metadata.action, first.action)
        shifts.append(len(sources))
        sources += metadata.sources
        infos += tuple(name for name in metadata.infos if name not in infos)
    named = {reader.metadata.environment for reader in readers}
    specs = {reader.metadata.env_spec for reader in readers}
    return (
        replace(
            first,
            environment=named.pop() if len(named) == 1 else first.environment,
            env_spec=specs.pop() if len(specs) == 1 else None,
            sources=sources,
            infos=infos,
            data_format=FORMATS[format],
            jpeg=False,
            size=None,
            files={},
        ),
        shifts,
    )


def _refuse_other(reader: Reader, first: Reader, what: str, found: Space, wanted: Space) -> None:
    if not same(found, wanted):
        raise UserError(
            f"{reader.folder} has {what} {found}, but {first.folder} has {wanted}: only datasets "
            "with the same spaces can be merged."
        )


def _all(
    readers: Sequence[Reader],
    shifts: Sequence[int],
    keep: Sequence[Array],
    metadata: Metadata,
    dropped: list[int] | None,
) -> Iterator[Stored]:
    """The episodes marked in `keep`; invalid ones go to `dropped`, if given."""
    for reader, shift, marked in zip(readers, shifts, keep, strict=True):
        lengths, sources, cut, begun = reader.episodes
        for number in np.flatnonzero(marked).tolist():
            piece = Piece(number, 0, int(lengths[number]) + 1)
            arrays = reader.storage.read([piece])
            if dropped is not None and not _fine(reader, arrays, piece):
                dropped.append(number)
                continue
            source = int(sources[number]) + shift
            flags = bool(cut[number]), bool(begun[number])
            yield Stored(_completed(arrays, metadata), source, *flags)


def _fine(reader: Reader, arrays: dict[str, Array], piece: Piece) -> bool:
    try:
        reader.check(arrays, [piece])
    except UserError:
        return False
    return True


def _completed(arrays: dict[str, Array], metadata: Metadata) -> dict[str, Array]:
    """The episode without its undefined last rows, and with placeholders for unknown columns."""
    steps = len(arrays["rewards"]) - 1
    found = {column.path: arrays[column.path] for column in metadata.observation_columns}
    for column in metadata.step_columns:
        known = arrays.get(column.path)
        if known is None:
            found[column.path] = np.full((steps, *column.shape), unknown(column), column.dtype)
        else:
            found[column.path] = known[:-1]
    return found


def _told(
    episodes: Iterable[Stored], tell: Callable[[int, int], None] | None, total: int, before: int = 0
) -> Iterator[Stored]:
    for number, episode in enumerate(episodes):
        if tell is not None:
            tell(before + number, total)
        yield episode


def _write(folder: Path, metadata: Metadata, episodes: Iterable[Stored]) -> Metadata:
    """Writes a new dataset; leaves nothing behind if that fails."""
    make_new(folder, "dataset")
    write = write_parquet if metadata.data_format == TABLE else write_hdf5
    try:
        made = write(folder, metadata, episodes)
        if made.episodes == 0:
            raise UserError(f"No episode is left for {folder}: it would be empty.")
        made.write(folder)
    except OSError as error:
        shutil.rmtree(folder / "data", ignore_errors=True)
        raise write_error(folder, error) from error
    except BaseException:
        shutil.rmtree(folder / "data", ignore_errors=True)
        raise
    return made
