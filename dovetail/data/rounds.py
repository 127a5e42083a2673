"""Feeds a dataset to a learner, whole or in rounds.

A dataset that fits into the memory limit is one round, read once. A larger one is cut into blocks
of steps. Each epoch shuffles the blocks and groups as many as fit into a round, which stays on the
device until as many steps have been sampled as it holds; the next one is read meanwhile. The order
of rounds depends only on the seed and the number of updates.
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
"""Rounds in memory: one being sampled, one being read, and one not yet freed."""
READING = 8
"""Reading may use 1 / READING of the memory."""


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
        """`row` converts `Rows` into the learner's rows; an item has `window` steps; `memory` is
        the limit in bytes."""
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
        """Rounds per epoch; 1 if the whole dataset is in memory."""
        rows = most_rows(lengths, block, self._at_once, behind)
        self.spec = DataSpec(total, self._at_once * block, rows)

    def read(self, number: int) -> Data:
        """Round `number`, in numpy arrays."""
        # `check` has already read the only round.
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
        # Padded to the same shapes in every round, or the learner would be compiled again.
        begins, left = np.zeros((2, spec.held), np.int32)
        begins[: len(found.begins)], left[: len(found.left)] = found.begins, found.left
        return Data(rows, begins, left, np.int32(len(found.begins)), self._window)

    def check(self) -> None:
        """Reads the whole dataset and raises if it has invalid values. A single round is kept for
        the next `read`."""
        if self.count == 1:
            self._checked = self.read(0)
            return
        for _ in self._reader.through(memory=min(self._memory, READ_BYTES)):
            pass  # `through` checks what it reads


class Feed:
    """Gives a learner its rounds in turn, and reads the next one in a thread."""

    def __init__(self, rounds: Rounds, draws: int) -> None:
        """`draws` is the number of steps sampled per update."""
        self._rounds = rounds
        # As many updates as it takes to sample a round's number of steps once.
        self._every = max(rounds.spec.held // max(draws, 1), 1) if rounds.count > 1 else sys.maxsize
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dovetail-data")
        self._ahead: tuple[int, Future[Data]] | None = None
        self.number = -1
        """The current round."""
        self.waited = 0.0
        """Seconds the learner has waited for rounds after the first."""

    def due(self, update: int) -> bool:
        """Whether an update samples a different round than the current one."""
        return update // self._every != self.number

    def left(self, update: int) -> int:
        """Number of updates until the next round, including this one."""
        return self._every - update % self._every

    def take(self, update: int) -> Data:
        """The round of an update, on the device."""
        number, began = update // self._every, time.perf_counter()
        ahead, self._ahead = self._ahead, None
        found = ahead[1].result() if ahead is not None and ahead[0] == number else None
        # Nothing was read ahead for the first round of a start.
        placed = jax.device_put(self._rounds.read(number) if found is None else found)
        if self.number >= 0:
            self.waited += time.perf_counter() - began
        self.number = number
        if self._rounds.count > 1:
            self._ahead = number + 1, self._pool.submit(self._rounds.read, number + 1)
        return placed

    def close(self) -> None:
        """Stops the thread; safe to call twice."""
        self._pool.shutdown(wait=True, cancel_futures=True)
