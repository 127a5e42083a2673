"""A dataset as the recorded steps that a learner draws from: all of it, or round after round.

What fits into the memory that is allowed is one round, read once. A larger dataset is cut into
blocks of steps; in each epoch their order is drawn anew, and as many as fit are a round, on the
device while as many steps are drawn as it has. The next one is read meanwhile. Which round is whose
turn depends on the seed and on the number of updates alone.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from dovetail.data.blocks import Blocks, whole_episodes
from dovetail.data.episode import Rows
from dovetail.data.hdf5 import Array, Piece
from dovetail.data.reader import Reader
from dovetail.replay.data import Data, DataSpec

TOGETHER = 1 << 16
"""Rows that are read at a time."""
ROUND_BLOCKS = 64
"""Blocks of a round: the more, the better mixed."""
AT_ONCE = 3
"""Rounds in memory: one that is drawn from, one that is read, and one that is not yet let go."""


class Rounds:
    """The rounds of a dataset."""

    def __init__(
        self,
        reader: Reader,
        row: Callable[[Rows], Any],
        *,
        window: int = 1,
        memory: int,
        seed: int = 0,
    ) -> None:
        """`row` makes a learner's rows of `Rows`; an item has `window` steps; `memory` is the most
        bytes to take."""
        self._reader, self._row, self._window, self._seed = reader, row, window, seed
        self._checked: Data | None = None
        self._example = row(reader.pieces([Piece(0, 0, 1)]))
        per_row = sum(x.nbytes for x in jax.tree.leaves(self._example))
        lengths, total = reader.episodes.lengths, reader.num_steps
        whole = (total + reader.num_episodes) * per_row + 8 * total
        held = total if whole <= memory else max(memory // (AT_ONCE * (per_row + 8)), 1)
        block = total if held == total else max(held // ROUND_BLOCKS, 1)
        self._blocks = Blocks(lengths, block, window)
        self._at_once = max(held // block, 1)
        self.count = -(-len(self._blocks) // self._at_once)
        """Rounds of an epoch; 1 if all of the dataset is in memory."""
        held = min(self._at_once * block, total)
        self.spec = DataSpec(total, held, self._most_rows(lengths, block))

    def _most_rows(self, lengths: Array, block: int) -> int:
        """The most rows of a round: the steps, and those behind each run of them."""
        ends = np.cumsum(lengths, dtype=np.int64)
        starts = np.arange(0, int(ends[-1]), block)
        stops = np.minimum(starts + block, ends[-1])
        episodes = np.searchsorted(ends, stops, "left") - np.searchsorted(ends, starts, "right") + 1
        behind = 1 if self.count == 1 else self._window
        rows = np.sort(stops - starts + behind * episodes)[::-1]
        return int(rows[: self._at_once].sum())

    def read(self, number: int) -> Data:
        """A round, in numpy arrays."""
        checked, self._checked = self._checked, None
        if checked is not None:
            return checked
        epoch, at = divmod(number, self.count)
        order = np.arange(len(self._blocks))
        if self.count > 1:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._blocks))
        found = self._blocks.get(np.sort(order[at * self._at_once : (at + 1) * self._at_once]))
        spec = self.spec
        rows = jax.tree.map(lambda x: np.zeros((spec.rows, *x.shape[1:]), x.dtype), self._example)
        first = 0
        for pieces in _together(found.pieces):
            part = self._row(self._reader.pieces(pieces))
            stop = first + sum(piece.stop - piece.start for piece in pieces)
            jax.tree.map(lambda to, x, a=first, b=stop: np.copyto(to[a:b], x), rows, part)
            first = stop
        begins, left = np.zeros((2, spec.held), np.int32)
        begins[: len(found.begins)], left[: len(found.left)] = found.begins, found.left
        return Data(rows, begins, left, np.int32(len(found.begins)), self._window)

    def check(self) -> None:
        """Reads all of a dataset, and names what cannot be in it. If it is one round, that is kept
        for who asks for it next."""
        if self.count == 1:
            self._checked = self.read(0)
            return
        lengths = self._reader.episodes.lengths
        for run in whole_episodes(lengths, TOGETHER):
            pieces = [Piece(number, 0, int(lengths[number]) + 1) for number in run]
            self._reader.check(self._reader.storage.read(pieces), pieces)


def _together(pieces: list[Piece]) -> list[list[Piece]]:
    """Pieces in groups of about `TOGETHER` rows."""
    sizes = np.array([piece.stop - piece.start for piece in pieces])
    bounds = np.flatnonzero(np.diff(np.cumsum(sizes) // TOGETHER, prepend=0)).tolist()
    edges = [0, *bounds, len(pieces)]
    return [pieces[a:b] for a, b in pairwise(edges) if b > a]


class Feed:
    """Gives a learner its rounds in turn, and reads the next one meanwhile."""

    def __init__(self, rounds: Rounds, draws: int) -> None:
        """`draws` are the steps that an update draws."""
        self._rounds = rounds
        self._every = max(rounds.spec.held // max(draws, 1), 1) if rounds.count > 1 else sys.maxsize
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dovetail-data")
        self._ahead: tuple[int, Future[Data]] | None = None
        self.number = -1
        """The round that was given last."""
        self.waited = 0.0
        """Seconds that the learner had to wait for rounds after the first."""

    def due(self, update: int) -> bool:
        """Whether an update is to draw from another round than was given last."""
        return update // self._every != self.number

    def left(self, update: int) -> int:
        """Updates until the next round, this one included."""
        return self._every - update % self._every

    def take(self, update: int) -> Data:
        """The round of an update, on the device."""
        number, began = update // self._every, time.perf_counter()
        ahead, self._ahead = self._ahead, None
        found = ahead[1].result() if ahead is not None and ahead[0] == number else None
        placed = jax.device_put(self._rounds.read(number) if found is None else found)
        if self.number >= 0:
            self.waited += time.perf_counter() - began
        self.number = number
        if self._rounds.count > 1:
            self._ahead = number + 1, self._pool.submit(self._rounds.read, number + 1)
        return placed

    def close(self) -> None:
        """Ends the thread; safe to call twice."""
        self._pool.shutdown(wait=True, cancel_futures=True)
