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
from typing import Any

import jax
import numpy as np

from dovetail.data.blocks import Blocks, fitting, most_rows
from dovetail.data.episode import Rows
from dovetail.data.reader import READ_BYTES, Reader
from dovetail.data.rows import RowReader
from dovetail.replay.data import Data, DataSpec

AT_ONCE = 3
"""Rounds in memory: one that is drawn from, one that is read, and one that is not yet let go."""
READING = 8
"""The part of the memory that reading takes meanwhile: one in so many."""


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
        self._reader, self._window, self._seed = reader, window, seed
        self._memory = memory
        self._checked: Data | None = None
        self._rows = RowReader(reader, row, memory // READING)
        per_row = self._rows.row_bytes
        lengths, total = reader.episodes.lengths, reader.num_steps
        block, self._at_once, behind = total, 1, 1
        if (total + reader.num_episodes) * per_row + 8 * total > memory:
            room = (memory - memory // READING) // AT_ONCE
            block, self._at_once = fitting(lengths, window, per_row, 8, room)
            behind = window
        self._blocks = Blocks(lengths, block, window)
        self.count = -(-len(self._blocks) // self._at_once)
        """Rounds of an epoch; 1 if all of the dataset is in memory."""
        rows = most_rows(lengths, block, self._at_once, behind)
        self.spec = DataSpec(total, self._at_once * block, rows)

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
        rows = self._rows.read(found.pieces, spec.rows)
        begins, left = np.zeros((2, spec.held), np.int32)
        begins[: len(found.begins)], left[: len(found.left)] = found.begins, found.left
        return Data(rows, begins, left, np.int32(len(found.begins)), self._window)

    def check(self) -> None:
        """Reads all of a dataset, and names what cannot be in it. If it is one round, that is kept
        for who asks for it next."""
        if self.count == 1:
            self._checked = self.read(0)
            return
        for _ in self._reader.through(memory=min(self._memory, READ_BYTES)):
            pass  # it is checked on the way


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
