"""Minari's layout: one HDF5 file with a group per episode.

Dovetail writes every array contiguously, with an index of file offsets. So episodes are read
straight from the file, in any order and in part, without HDF5's overhead per array; each has a
check sum. A file that Minari wrote or appended to has no index and is read with h5py.
"""

import io
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from dovetail.data.extras import package
from dovetail.data.metadata import HDF5, Metadata, images
from dovetail.data.room import Room
from dovetail.data.spaces import Column
from dovetail.errors import UserError
from dovetail.run.folder import sync

Array = np.ndarray[Any, np.dtype[Any]]

FILE = "main_data.hdf5"
INDEX = "index.npz"
ALIGNMENT = 8
FILE_ROOM, EPISODE_ROOM, COLUMN_ROOM = 1 << 16, 2048, 768
"""Upper bounds on HDF5's overhead in bytes: per file, per episode and per column."""
ATTRIBUTES = {"id", "total_steps", "source", "cut", "begun"}
"""The attributes of an episode that are read."""
VERIFIED = 1 << 20
"""Bytes read at a time when verifying a check sum."""


class Piece(NamedTuple):
    """Rows `start` … `stop` - 1 of an episode; the final observation is row number `steps`."""

    episode: int
    start: int
    stop: int


class EpisodeColumns(NamedTuple):
    """Per-episode values of a dataset: [episodes] each."""

    lengths: Array
    sources: Array
    cut: Array
    begun: Array

    @property
    def whole(self) -> Array:
        """Whether each was recorded from its first step to its last: not a fragment."""
        return self.begun & ~self.cut


class Storage(Protocol):
    """The interface for reading episodes."""

    episodes: EpisodeColumns

    def read(self, pieces: Sequence[Piece], only: Sequence[str] = ()) -> dict[str, Array]:
        """The columns of these pieces, concatenated, all or `only` some; a column without a value
        in an episode's extra last row has zeros there."""
        ...

    def verify(self, episode: int) -> None:
        """Verifies the check sum of an episode that is read in parts, if it has one."""
        ...

    def unread(self) -> list[str]:
        """Names of further contents of episodes that are not read: infos, attributes."""
        ...

    def close(self) -> None:
        """Closes the files."""
        ...


class Stored(NamedTuple):
    """One episode to be written to a file."""

    arrays: Mapping[str, Array]
    """By column path."""
    source: int
    cut: bool
    begun: bool


def write_hdf5(folder: Path, metadata: Metadata, episodes: Iterable[Stored]) -> Metadata:
    """Writes the file and its index into `folder`/data; returns the updated metadata.

    Space is reserved before each write, because HDF5 crashes when the disk is full.
    """
    h5py = package("h5py")
    place = folder / "data"
    temporary = place / f"{FILE}.part"
    columns = metadata.columns
    lengths: list[int] = []
    sources: list[int] = []
    cut: list[bool] = []
    begun: list[bool] = []
    offsets: list[list[int]] = []
    sums: list[int] = []
    place.mkdir(parents=True, exist_ok=True)
    options = {"alignment_threshold": 1, "alignment_interval": ALIGNMENT}
    with h5py.File(temporary, "w", libver="latest", **options) as file:
        room = Room(file.id.get_vfd_handle())
        room.take(FILE_ROOM)
        for number, episode in enumerate(episodes):
            room.take(_most_bytes(columns, episode.arrays))
            group = file.create_group(f"episode_{number}")
            steps = len(episode.arrays["rewards"])
            told = {"source": episode.source, "cut": episode.cut, "begun": episode.begun}
            group.attrs.update({"id": number, "total_steps": steps, **told})
            offsets.append(_put(group, columns, episode.arrays))
            sums.append(checksum(episode.arrays[column.path] for column in columns))
            lengths.append(steps)
            sources.append(episode.source)
            cut.append(episode.cut)
            begun.append(episode.begun)
        end = file.id.get_filesize()
    size = min(end, temporary.stat().st_size)
    os.truncate(temporary, size)  # release the unused reservation
    sync(temporary)
    with (place / INDEX).open("wb") as index:
        np.savez(
            index,
            lengths=np.array(lengths, np.int64),
            sources=np.array(sources, np.int32),
            cut=np.array(cut, np.bool_),
            begun=np.array(begun, np.bool_),
            offsets=np.array(offsets, np.int64).reshape(-1, len(columns)),
            sums=np.array(sums, np.uint32),
        )
    sync(place / INDEX)
    # Last: a file with its final name is complete and has its index.
    os.replace(temporary, place / FILE)
    return replace(
        metadata, data_format=HDF5, episodes=len(lengths), steps=sum(lengths), size=size, jpeg=False
    )


def _most_bytes(columns: Sequence[Column], arrays: Mapping[str, Array]) -> int:
    """Upper bound on an episode's size in the file."""
    return EPISODE_ROOM + sum(COLUMN_ROOM + arrays[column.path].nbytes for column in columns)


def _put(group: Any, columns: Sequence[Column], arrays: Mapping[str, Array]) -> list[int]:
    """Writes an episode's arrays; returns their file offsets.

    Uses h5py's low-level API, which costs less than the high-level one.
    """
    h5py = package("h5py")
    found: list[int] = []
    places: dict[str, Any] = {"": group.id}
    for column in columns:
        array = arrays[column.path]
        folder, _, name = column.path.rpartition("/")
        if folder not in places:
            places[folder] = group.create_group(folder).id
        space = h5py.h5s.create_simple(array.shape)
        kind = h5py.h5t.py_create(column.dtype, logical=True)
        written = h5py.h5d.create(places[folder], name.encode(), kind, space)
        written.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ascontiguousarray(array))
        found.append(written.get_offset())
    return found


def checksum(arrays: Iterable[Array]) -> int:
    """One CRC-32 over all arrays."""
    found = 0
    for array in arrays:
        if array.size:
            found = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, found)
    return found


def open_hdf5(folder: Path, metadata: Metadata) -> Storage:
    """Opens the file of a dataset; raises if it is missing, half-written or damaged."""
    file, index = folder / "data" / FILE, folder / "data" / INDEX
    if not file.exists():
        raise UserError(f"{file} is missing: take it from a copy of the dataset.")
    size = file.stat().st_size
    if metadata.size is None or not index.exists():
        return LinkedFile(file, metadata)
    if size < metadata.size:
        raise UserError(
            f"{file} is cut short: it has {size:,} bytes of {metadata.size:,}; take it from a copy "
            "of the dataset."
        )
    if size > metadata.size:
        raise UserError(
            f"{file} has {size:,} bytes, but {metadata.size:,} were written: it is damaged, or "
            "another's; take it from a copy of the dataset."
        )
    return IndexedFile(file, index, metadata)


class IndexedFile:
    """A file that Dovetail wrote, read directly at its arrays' offsets."""

    def __init__(self, file: Path, index: Path, metadata: Metadata) -> None:
        try:
            # Opened here: NumPy leaves a file open that it cannot read.
            with index.open("rb") as opened, np.load(opened, allow_pickle=False) as found:
                arrays = {name: found[name] for name in found.files}
            begun = arrays.get("begun", np.ones(len(arrays["cut"]), np.bool_))
            self.episodes = EpisodeColumns(
                arrays["lengths"], arrays["sources"], arrays["cut"], begun
            )
            self._offsets, self._sums = arrays["offsets"], arrays["sums"]
        except (OSError, ValueError, KeyError, zlib.error, EOFError) as error:
            raise _damaged(index, error) from error
        except Exception as error:  # zipfile's errors
            raise _damaged(index, error) from error
        self._columns = metadata.columns
        self._observed = len(metadata.observation_columns)
        if self._offsets.shape != (metadata.episodes, len(self._columns)):
            raise UserError(f"{index} does not belong to {file}: take both from one copy.")
        self._file = file
        self._descriptor = os.open(file, os.O_RDONLY)

    def read(self, pieces: Sequence[Piece], only: Sequence[str] = ()) -> dict[str, Array]:
        """The columns of the pieces; verifies the check sums of whole episodes."""
        total = sum(piece.stop - piece.start for piece in pieces)
        wanted = [not only or column.path in only for column in self._columns]
        arrays = [
            np.zeros((total if want else 0, *c.shape), c.dtype)
            for c, want in zip(self._columns, wanted, strict=True)
        ]
        flat = [x.reshape(len(x), -1).view(np.uint8) if x.size else x for x in arrays]
        bytes_of = [
            column.row_bytes if want else 0
            for column, want in zip(self._columns, wanted, strict=True)
        ]
        at = 0
        for piece in pieces:
            steps = int(self.episodes.lengths[piece.episode])
            offsets = self._offsets[piece.episode].tolist()
            check = 0
            for number, (column, width) in enumerate(zip(flat, bytes_of, strict=True)):
                # Only observations have the extra row after the last step.
                stop = piece.stop if number < self._observed else min(piece.stop, steps)
                if stop <= piece.start or not width:
                    continue
                part = column[at : at + stop - piece.start].reshape(-1).data
                self._fill(part, offsets[number] + piece.start * width)
                check = zlib.crc32(part, check)
            # A check sum covers all columns of an episode, so it can be compared only then.
            whole = not only and piece.start == 0 and piece.stop == steps + 1
            if whole:
                self._compare(piece.episode, check)
            at += piece.stop - piece.start
        found = zip(self._columns, arrays, wanted, strict=True)
        return {column.path: x for column, x, want in found if want}

    def verify(self, episode: int) -> None:
        """Verifies the check sum of an episode that is read in parts."""
        steps, check = int(self.episodes.lengths[episode]), 0
        buffer = memoryview(bytearray(VERIFIED))
        for number, (column, offset) in enumerate(
            zip(self._columns, self._offsets[episode].tolist(), strict=True)
        ):
            size = column.row_bytes * (steps + (number < self._observed))
            for begin in range(0, size, VERIFIED):
                part = buffer[: min(VERIFIED, size - begin)]
                self._fill(part, offset + begin)
                check = zlib.crc32(part, check)
        self._compare(episode, check)

    def unread(self) -> list[str]:
        """Nothing: Dovetail writes no other contents."""
        return []

    def _compare(self, episode: int, check: int) -> None:
        if check != self._sums[episode]:
            raise UserError(
                f"{self._file} is damaged: episode {episode} is not what was written; take it from "
                "a copy of the dataset."
            )

    def _fill(self, part: memoryview, offset: int) -> None:
        done = 0
        while done < len(part):
            count = os.preadv(self._descriptor, [part[done:]], offset + done)
            if count == 0:
                raise UserError(f"{self._file} is cut short: take it from a copy of the dataset.")
            done += count

    def close(self) -> None:
        """Closes the file; safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LinkedFile:
    """A file that Minari wrote or appended to, read with h5py."""

    def __init__(self, file: Path, metadata: Metadata) -> None:
        h5py = package("h5py")
        self._path, self._metadata = file, metadata
        self._images = images(metadata)
        try:
            self._file: Any = h5py.File(file, "r")
            groups = [self._file[f"episode_{n}"] for n in range(metadata.episodes)]
            lengths = [int(group["rewards"].shape[0]) for group in groups]
            sources = [int(group.attrs.get("source", 0)) for group in groups]
            ends = [bool(g["terminations"][-1] | g["truncations"][-1]) for g in groups]
            cut = [bool(group.attrs.get("cut", False)) for group in groups]
            begun = [bool(group.attrs.get("begun", True)) for group in groups]
        except Exception as error:  # h5py raises many kinds for malformed files
            raise _damaged(file, error) from error
        self.episodes = EpisodeColumns(
            np.array(lengths, np.int64),
            np.array(sources, np.int32),
            # An episode of Minari that neither terminated nor was truncated was broken off.
            np.array(cut, np.bool_) | ~np.array(ends, np.bool_),
            np.array(begun, np.bool_),
        )

    def read(self, pieces: Sequence[Piece], only: Sequence[str] = ()) -> dict[str, Array]:
        """The columns of the pieces."""
        observed = len(self._metadata.observation_columns)
        found: dict[str, Array] = {}
        for number, column in enumerate(self._metadata.columns):
            if only and column.path not in only:
                continue
            parts = [self._part(column, piece, number < observed) for piece in pieces]
            found[column.path] = np.concatenate(parts)
        return found

    def _part(self, column: Column, piece: Piece, observed: bool) -> Array:
        """One column of a piece, with zeros where there is no value."""
        rows, steps = piece.stop - piece.start, int(self.episodes.lengths[piece.episode])
        stop = piece.stop if observed else min(piece.stop, steps)
        whole = np.zeros((rows, *column.shape), column.dtype)
        if stop <= piece.start:
            return whole
        try:
            group = self._file[f"episode_{piece.episode}"]
            if column.path.startswith("infos/") and column.path not in group:
                whole[...] = unknown(column)  # an episode appended by Minari
                return whole
            stored = group[column.path][piece.start : stop]
            if column.path in self._images:
                stored = np.stack([_picture(frame) for frame in stored])
        except Exception as error:  # h5py's and Pillow's errors
            where = f"episode {piece.episode}, {column.path}: "
            raise _damaged(self._path, error, where) from error
        if stored.shape != (stop - piece.start, *column.shape):
            raise UserError(
                f"{self._path}: episode {piece.episode} has {column.path} of shape "
                f"{stored.shape[1:]} in {len(stored)} rows, but its space says {column.shape}."
            )
        whole[: len(stored)] = stored
        # Learners bootstrap at the end of a cut episode, as at any truncation.
        if column.path == "truncations" and stop == steps and self.episodes.cut[piece.episode]:
            whole[steps - 1 - piece.start] = True
        return whole

    def verify(self, episode: int) -> None:
        """Does nothing: Minari writes no check sums."""

    def unread(self) -> list[str]:
        """Further contents of episodes: other infos, and attributes such as seeds."""
        found: set[str] = set()
        try:
            for number in range(len(self.episodes.lengths)):
                group = self._file[f"episode_{number}"]
                infos = set(group["infos"]) if "infos" in group else set[str]()
                found |= {f"infos/{name}" for name in infos - set(self._metadata.infos)}
                found |= set(group.attrs) - ATTRIBUTES
        except Exception as error:  # h5py's errors
            raise _damaged(self._path, error) from error
        return sorted(found)

    def close(self) -> None:
        """Closes the file; safe to call twice."""
        self._file.close()


def unknown(column: Column) -> float:
    """The value that marks a number as not recorded."""
    return np.nan if column.dtype.kind == "f" else -1


def _picture(frame: Array) -> Array:
    """Decodes a frame that Minari stored as JPEG."""
    from PIL import Image

    with Image.open(io.BytesIO(np.asarray(frame, np.uint8).tobytes())) as image:
        return np.asarray(image, np.uint8)


def _damaged(file: Path, error: Exception, where: str = "") -> UserError:
    what = " ".join(str(error).split()) or type(error).__name__
    return UserError(
        f"{file} is damaged or half-written ({where}{what}): take it from a copy of the dataset."
    )
