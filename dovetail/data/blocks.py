"""Cuts a dataset into blocks: runs of consecutive steps of about equal size."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dovetail.data.hdf5 import Array, Piece

ROUND_BLOCKS = 64
"""Number of blocks in memory together: more blocks mix better."""


class Block(NamedTuple):
    """The rows that windows of steps need, and the row at which each window starts."""

    pieces: list[Piece]
    begins: Array
    """[steps]: index of each step's row."""
    left: Array
    """[steps]: number of steps from this one to the end of its episode, inclusive."""
    steps: Array
    """[steps]: number of the step within the dataset."""


class Blocks:
    """The steps of all episodes, numbered consecutively and cut into blocks."""

    def __init__(self, lengths: Array, steps: int, behind: int) -> None:
        """Blocks of `steps` steps, each run with up to `behind` further rows of its episode."""
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._steps, self._behind = steps, behind
        self.total = int(self._starts[-1])

    def __len__(self) -> int:
        return -(-self.total // self._steps)

    def size(self, number: int) -> int:
        """Number of steps in a block."""
        return min(self._steps, self.total - number * self._steps)

    def get(self, numbers: Array) -> Block:
        """Several blocks, joined into one."""
        pieces: list[Piece] = []
        begins: list[Array] = []
        left: list[Array] = []
        steps: list[Array] = []
        at = 0
        for number in numbers.tolist():
            begin = number * self._steps
            stop = begin + self.size(number)
            # A block may begin and end in the middle of an episode.
            first = int(np.searchsorted(self._starts, begin, side="right")) - 1
            last = int(np.searchsorted(self._starts, stop, side="left"))
            for episode in range(first, last):
                start, end = int(self._starts[episode]), int(self._starts[episode + 1])
                a, b = max(begin, start), min(stop, end)
                piece = Piece(episode, a - start, min(b - start + self._behind, end - start + 1))
                pieces.append(piece)
                begins.append(np.arange(at, at + b - a))
                # Counts down to 1 at the last step of the episode.
                left.append(np.arange(end - a, end - b, -1))
                steps.append(np.arange(a, b))
                at += piece.stop - piece.start
        return Block(pieces, *(np.concatenate(x) for x in (begins, left, steps)))


def fitting(
    lengths: Array, window: int, row_bytes: int, step_bytes: int, room: int
) -> tuple[int, int]:
    """(steps per block, number of blocks): as many steps as fit into `room` bytes with the rows
    after them, at least one, in about `ROUND_BLOCKS` blocks. A step takes `step_bytes` in addition
    to its row."""
    steps = min(max(room // (row_bytes + step_bytes), 1), int(lengths.sum()))
    while True:
        block = max(steps // ROUND_BLOCKS, 1)
        count = steps // block
        needed = most_rows(lengths, block, count, window) * row_bytes + count * block * step_bytes
        if needed <= room or steps == 1:
            return block, count
        # Shrink in proportion, by at least one step, until it fits.
        steps = max(min(steps - 1, steps * room // needed), 1)


def most_rows(lengths: Array, block: int, count: int, behind: int) -> int:
    """Maximum number of rows in `count` blocks of `block` steps: the steps, and `behind` rows after
    each run of steps of one episode."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = np.arange(0, int(ends[-1]), block)
    stops = np.minimum(starts + block, ends[-1])
    episodes = np.searchsorted(ends, stops, "left") - np.searchsorted(ends, starts, "right") + 1
    # The largest blocks: any may come together in a round.
    rows = np.sort(stops - starts + behind * episodes)[::-1]
    return int(rows[:count].sum())


def grouped(pieces: Iterable[Piece], rows: int) -> Iterator[list[Piece]]:
    """Pieces in groups of at most `rows` rows; only pieces longer than that are cut."""
    group: list[Piece] = []
    room = rows
    for episode, begin, stop in pieces:
        start = begin
        if stop - start > room and group:
            yield group
            group, room = [], rows
        while stop - start > rows:
            yield [Piece(episode, start, start + rows)]
            start += rows
        group.append(Piece(episode, start, stop))
        room -= stop - start
    if group:
        yield group


def last_rows(pieces: Sequence[Piece], lengths: Array) -> Array:
    """Indices of the rows after an episode's last step, which hold no action."""
    ends = np.cumsum([piece.stop - piece.start for piece in pieces]) - 1
    return ends[[piece.stop > lengths[piece.episode] for piece in pieces]]


def whole_episodes(lengths: Array, steps: int) -> Iterator[range]:
    """Ranges of whole episodes of about `steps` steps each."""
    bounds = np.flatnonzero(np.diff(np.cumsum(lengths) // max(steps, 1), prepend=0)) + 1
    stops = sorted({*bounds.tolist(), len(lengths)})
    for first, stop in zip([0, *stops[:-1]], stops, strict=True):
        yield range(first, stop)
