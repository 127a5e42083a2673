"""The memory that environment processes share with the process that steps them.

One segment holds the actions and two sets of step results: while one set is read, the next step is
written into the other. The segment has no name, so nothing is left behind whichever process dies,
and all its pages are allocated up front. This module does not import JAX, because environment
processes run without it.
"""

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from dovetail.errors import UserError

FOLDER = "/dev/shm"
"""Where Linux keeps files in memory."""
LINE = 64
"""Bytes of a cache line: every array, and every process's words, are aligned to one."""
WORDS = LINE // 8
COMMAND, DONE, FINAL = range(3)
"""A process's words: the command; the last exchange it finished, negative if it failed; the last
exchange in which it wrote final observations."""

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class SharedArrays:
    """The arrays of a batch of elements of one space, as a flat list and as a tree."""

    paths: tuple[Path, ...]
    arrays: tuple[np.ndarray, ...]
    tree: Any
    only: np.ndarray | None
    """The array, if the space is not a Dict or Tuple."""


@dataclass(frozen=True)
class StepResult:
    """The arrays of one step's results."""

    observation: SharedArrays
    final: SharedArrays | None
    """Final observations, set where an episode ended; None if the step does not provide them."""
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    info: np.ndarray | None
    """Logged values, float32[B, K]; None without any."""


@dataclass(frozen=True)
class Views:
    """The arrays of a segment, for all environments or for some."""

    words: memoryview
    action: SharedArrays
    outcomes: tuple[StepResult, StepResult]
    """Steps alternate between the two; a reset writes into the last step's."""


@dataclass(frozen=True)
class SegmentLayout:
    """Offsets within the segment; both ends derive them from the same spaces."""

    observation: spaces.Space[Any]
    action: spaces.Space[Any]
    num_envs: int
    processes: int
    finals: bool
    """Whether final observations come with the new episodes' first ones (same-step autoreset)."""
    info: int = 0
    """Number of logged values of each environment."""

    def size(self) -> int:
        """Total size in bytes."""
        outcome = self._row(self.observation) * (2 if self.finals else 1)
        outcome += _room(4 * self.num_envs) + 2 * _room(self.num_envs)
        outcome += _room(4 * self.num_envs * self.info)
        return self.processes * LINE + self._row(self.action) + 2 * outcome

    def views(self, memory: mmap.mmap, rows: slice) -> Views:
        """The arrays of the environments `rows`."""
        place = _Placing(memory, self.num_envs, rows, self.processes * LINE)
        action = place.batch(self.action)
        outcomes = [
            StepResult(
                place.batch(self.observation),
                place.batch(self.observation) if self.finals else None,
                place.array((), np.dtype(np.float32)),
                place.array((), np.dtype(np.bool_)),
                place.array((), np.dtype(np.bool_)),
                place.array((self.info,), np.dtype(np.float32)) if self.info else None,
            )
            for _ in range(2)
        ]
        words = memoryview(memory)[: self.processes * LINE].cast("q")
        return Views(words, action, (outcomes[0], outcomes[1]))

    def _row(self, space: spaces.Space[Any]) -> int:
        return sum(
            _room(self.num_envs * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
            for _, shape, dtype in _leaves(space)
        )


class _Placing:
    """Places one array after another."""

    def __init__(self, memory: mmap.mmap, num_envs: int, rows: slice, start: int) -> None:
        self._memory, self._num_envs, self._rows, self._at = memory, num_envs, rows, start

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        whole = np.ndarray((self._num_envs, *shape), dtype, self._memory, self._at)
        self._at += _room(whole.nbytes)
        return whole[self._rows]

    def batch(self, space: spaces.Space[Any]) -> SharedArrays:
        found = [(path, self.array(shape, dtype)) for path, shape, dtype in _leaves(space)]
        paths = tuple(path for path, _ in found)
        arrays = tuple(array for _, array in found)
        return SharedArrays(
            paths, arrays, _tree(space, iter(arrays)), arrays[0] if paths == ((),) else None
        )


def at(x: Any, path: Path) -> Any:
    """The array at a leaf's path."""
    for part in path:
        x = x[part]
    return x


def fits(space: spaces.Space[Any]) -> bool:
    """Whether every element of a space has the same size, and so fits into a segment."""
    try:
        return bool(list(_leaves(space)))
    except TypeError:
        return False


def create(size: int, env_id: str, num_envs: int) -> int:
    """A file descriptor of a new segment: an unlinked file in memory."""
    folder = FOLDER if os.path.isdir(FOLDER) else tempfile.gettempdir()
    if (free := _free(folder)) < size:
        raise _too_small(size, free, folder, env_id, num_envs)
    descriptor, name = tempfile.mkstemp(prefix="dovetail-", dir=folder)
    # Unlinked at once: the memory disappears with its users.
    os.unlink(name)
    try:
        os.ftruncate(descriptor, size)
        if hasattr(os, "posix_fallocate"):  # a page missing later would kill the process (SIGBUS)
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        if error.errno != errno.ENOSPC:
            raise
        raise _too_small(size, _free(folder), folder, env_id, num_envs) from error
    return descriptor


def attach(descriptor: int, size: int) -> mmap.mmap:
    """The segment's memory, mapped for as long as any array refers to it."""
    memory = mmap.mmap(descriptor, size)
    os.close(descriptor)
    return memory


def _free(folder: str) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _too_small(size: int, free: int, folder: str, env_id: str, num_envs: int) -> UserError:
    return UserError(
        f"{env_id}: {num_envs} environments in processes of their own need {size / 2**20:.2f} MB "
        f"of shared memory, and {folder} has {free / 2**20:.2f} MB free: use fewer environments, "
        "remove what fills it, or enlarge it (docker run --shm-size=2g; mount -o remount,size=2G "
        f"{folder})."
    )


def _room(size: int) -> int:
    return -(-size // LINE) * LINE


def _leaves(
    space: spaces.Space[Any], path: Path = ()
) -> Iterator[tuple[Path, tuple[int, ...], np.dtype[Any]]]:
    """The arrays of one element of a space: path, shape and dtype."""
    if isinstance(space, spaces.Dict):
        for key, entry in space.spaces.items():
            yield from _leaves(entry, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, entry in enumerate(space.spaces):
            yield from _leaves(entry, (*path, index))
    elif isinstance(
        space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    ):
        yield path, tuple(space.shape or ()), np.dtype(space.dtype)
    else:
        raise TypeError(f"{type(space).__name__} has no fixed size")


def _tree(space: spaces.Space[Any], arrays: Iterator[np.ndarray]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _tree(entry, arrays) for key, entry in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_tree(entry, arrays) for entry in space.spaces)
    return next(arrays)
