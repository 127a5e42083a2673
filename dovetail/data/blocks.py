"""A dataset in blocks: runs of steps of about equal size, in which it is read from end to end."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dovetail.data.hdf5 import Array, Piece


class Block(NamedTuple):
    """The rows that windows of steps need, and where among them each window begins."""

    pieces: list[Piece]
    begins: Array
    """[steps]: the row of each step."""
    left: Array
    """[steps]: how many steps there are from it to the end of its episode, itself included."""
    steps: Array
    """[steps]: its number among all steps of the dataset."""


class Blocks:
    """The steps of episodes of given lengths, numbered through and cut into blocks."""

    def __init__(self, lengths: Array, steps: int, behind: int) -> None:
        """Blocks of `steps` steps; with them go `behind` rows, or as many as the episode has."""
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._steps, self._behind = steps, behind
        self.total = int(self._starts[-1])

    def __len__(self) -> int:
        return -(-self.total // self._steps)

    def size(self, number: int) -> int:
        """Steps of a block."""
        return min(self._steps, self.total - number * self._steps)

    def get(self, numbers: Array) -> Block:
        """Several blocks as one."""
        pieces: list[Piece] = []
        begins: list[Array] = []
        left: list[Array] = []
        steps: list[Array] = []
        at = 0
        for number in numbers.tolist():
            begin = number * self._steps
            stop = begin + self.size(number)
            first = int(np.searchsorted(self._starts, begin, side="right")) - 1
            last = int(np.searchsorted(self._starts, stop, side="left"))
            for episode in range(first, last):
                start, end = int(self._starts[episode]), int(self._starts[episode + 1])
                a, b = max(begin, start), min(stop, end)
                piece = Piece(episode, a - start, min(b - start + self._behind, end - start + 1))
                pieces.append(piece)
                begins.append(np.arange(at, at + b - a))
                left.append(np.arange(end - a, end - b, -1))
                steps.append(np.arange(a, b))
                at += piece.stop - piece.start
        return Block(pieces, *(np.concatenate(x) for x in (begins, left, steps)))


def whole_episodes(lengths: Array, steps: int) -> Iterator[range]:
    """Runs of whole episodes, of about `steps` steps each."""
    bounds = np.flatnonzero(np.diff(np.cumsum(lengths) // max(steps, 1), prepend=0)) + 1
    stops = sorted({*bounds.tolist(), len(lengths)})
    for first, stop in zip([0, *stops[:-1]], stops, strict=True):
        yield range(first, stop)
