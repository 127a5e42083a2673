"""Shuffled batches from disk, prefetched in bounded memory.

The dataset is cut into blocks of steps. Each epoch shuffles the blocks, reads several at a time as
one round, and yields the round's steps in random order: every step once per epoch, except for a
remainder of less than a batch per round. One thread reads the next round while another assembles
batches of the current one. The batches depend only on the seed and the position.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from dovetail.data.blocks import Blocks, fitting
from dovetail.data.episode import Rows
from dovetail.data.hdf5 import Array
from dovetail.data.reader import Reader
from dovetail.data.rows import RowReader
from dovetail.errors import check_option
from dovetail.replay.sample import ItemKeys, Sample

MEMORY = 1 << 28
"""Default memory limit in bytes."""
TOGETHER = 1 << 13
"""Maximum number of windows assembled at a time."""
STEP_BYTES = 32
"""Bytes per step of a round in addition to its rows: four numbers."""
POLL = 0.1
"""Seconds between checks whether the stream was closed."""


class _Round(NamedTuple):
    """Blocks that were read together."""

    rows: Any
    begins: Array
    left: Array
    steps: Array
    order: Array
    skip: int
    """Number of its first batches that were already yielded."""


class Stream:
    """An endless iterator over batches of windows, as `Sample`s of numpy arrays.

    A window is `steps` steps and the row after them, cut at the end of the episode, as in
    `dovetail.replay.Transitions(steps)`. `row` converts `Rows` into an algorithm's rows.
    """

    def __init__(
        self,
        reader: Reader,
        batch: int,
        *,
        steps: int = 1,
        row: Callable[[Rows], Any] = lambda rows: rows,
        seed: int = 0,
        start: int = 0,
        memory: int = MEMORY,
        ahead: int = 8,
    ) -> None:
        """`start` is the number of the first batch, `memory` the limit in bytes (plus a few
        batches), `ahead` the number of batches to prefetch, if the memory allows."""
        for name, value in (("batch", batch), ("steps", steps), ("ahead", ahead)):
            check_option(name, value, value >= 1, "1 or more")
        self._batch, self._window, self._seed = batch, steps, seed
        # Memory budget: 5/16 for each of two rounds, 1/8 for reading, 1/4 for batches (queued ones,
        # and twice those being assembled).
        self._rows = RowReader(reader, row, memory // 8)
        lengths, per_row = reader.episodes.lengths, self._rows.row_bytes
        block, count = fitting(lengths, steps, per_row, STEP_BYTES, memory * 5 // 16)
        self._blocks, self._at_once = Blocks(lengths, block, steps), max(count, -(-batch // block))
        # A window has one more row than steps.
        per_batch = batch * (steps + 1) * per_row
        self._together = max(min(TOGETHER // batch, memory // 16 // per_batch), 1)
        ahead = max(min(ahead, memory // 8 // per_batch), 1)
        self.position = start
        """Number of batches yielded, including those before `start`."""
        self.waited = 0.0
        """Seconds that the consumer has waited."""
        self._closed = threading.Event()
        # One round may be read ahead.
        self._room = threading.Semaphore(1)
        self._rounds: queue.Queue[_Round | BaseException] = queue.Queue()
        self._samples: queue.Queue[Sample | BaseException] = queue.Queue(ahead)
        self._threads = [
            threading.Thread(target=work, name=f"dovetail-data-{name}", daemon=True)
            for name, work in (("reading", self._read), ("batching", self._make))
        ]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Sample:
        """The next batch."""
        began = time.perf_counter()
        found = self._samples.get()
        self.waited += time.perf_counter() - began
        if isinstance(found, BaseException):
            self.close()
            raise found
        self.position += 1
        return found

    def close(self) -> None:
        """Stops the threads; safe to call twice."""
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        self.close()

    def epoch(self, number: int) -> list[tuple[Array, int]]:
        """The rounds of an epoch: (blocks, number of batches) each."""
        # A generator for each epoch, so that any position can be reached without the ones before.
        order = np.random.default_rng([self._seed, number]).permutation(len(self._blocks))
        rounds = [order[at : at + self._at_once] for at in range(0, len(order), self._at_once)]
        sizes = [sum(self._blocks.size(int(block)) for block in blocks) for blocks in rounds]
        return [(b, max(size // self._batch, 1)) for b, size in zip(rounds, sizes, strict=True)]

    def _planned(self) -> Iterator[tuple[Array, tuple[int, int], int]]:
        """(blocks, (epoch, round), batches to skip), starting at `position`."""
        skip, epoch = self.position, 0
        while True:
            rounds = self.epoch(epoch)
            total = sum(count for _, count in rounds)
            if skip >= total:
                skip -= total
            else:
                for number, (blocks, count) in enumerate(rounds):
                    if skip < count:
                        yield blocks, (epoch, number), skip
                    skip = max(skip - count, 0)
            epoch += 1

    def _read(self) -> None:
        """The thread that reads rounds, one ahead."""
        try:
            for blocks, place, skip in self._planned():
                while not self._room.acquire(timeout=POLL):
                    if self._closed.is_set():
                        return
                if self._closed.is_set():
                    return
                # Sorted for sequential reads; `order` shuffles the steps.
                found = self._blocks.get(np.sort(blocks))
                rows = self._rows.read(found.pieces)
                order = np.random.default_rng([self._seed, *place]).permutation(len(found.begins))
                self._rounds.put(_Round(rows, *found[1:], order, skip))
        except BaseException as error:
            self._rounds.put(error)

    def _make(self) -> None:
        """The thread that assembles batches."""
        try:
            while not self._closed.is_set():
                try:
                    found = self._rounds.get(timeout=POLL)
                except queue.Empty:
                    continue
                if isinstance(found, BaseException):
                    raise found
                # The round is out of the queue, so the next may be read.
                self._room.release()
                count = max(len(found.order) // self._batch, 1)
                for first in range(found.skip, count, self._together):
                    for sample in self._made(found, first, min(first + self._together, count)):
                        if not self._give(sample):
                            return
        except BaseException as error:
            self._give(error)

    def _give(self, sample: Sample | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._samples.put(sample, timeout=POLL)
                return True
            except queue.Full:
                continue
        return False

    def _made(self, found: _Round, first: int, stop: int) -> Iterator[Sample]:
        """Batches `first` … `stop` - 1 of a round, gathered in one call, which costs less."""
        size = self._batch
        # A dataset smaller than a batch is repeated to fill it.
        chosen = np.resize(found.order[first * size : stop * size], (stop - first) * size)
        within = np.arange(self._window + 1)
        left = found.left[chosen, None]
        # Past the end of an episode its last row is repeated, and masked.
        index = found.begins[chosen, None] + np.minimum(within, left)
        steps = found.steps[chosen]
        whole = Sample(
            rows=jax.tree.map(lambda x: np.take(x, index, axis=0), found.rows),
            mask=within < np.minimum(left, self._window),
            keys=ItemKeys(slot=steps, number=np.zeros_like(steps)),
            probabilities=np.full(len(chosen), 1 / self._blocks.total, np.float32),
            size=np.int32(min(self._blocks.total, np.iinfo(np.int32).max)),
            times=np.zeros(len(chosen), np.int32),
        )
        for at in range(0, len(chosen), size):
            yield jax.tree.map(lambda x, a=at: x[a : a + size] if np.ndim(x) else x, whole)
