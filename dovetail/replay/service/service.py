"""A thread-safe replay table: a lock, a rate limiter, and time limits on every wait.

Errors say what a call waited for. When no progress is possible (inserting and sampling wait for
each other, or all inserters have left), waiting calls raise.
"""

import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import UserError
from dovetail.replay.host.incoming import IncomingSteps, Plain
from dovetail.replay.host.output import Output
from dovetail.replay.host.table import HostTable
from dovetail.replay.limiter import RateLimiter
from dovetail.replay.sample import ItemKeys, Sample
from dovetail.replay.storage.journal import Journal
from dovetail.replay.storage.save import check_saved, load, save

Array = np.ndarray[Any, np.dtype[Any]]

GROWN = 1 << 30
"""Log size in bytes after which a durable service makes a snapshot."""
PATIENCE = 1.0
"""Seconds without progress after which inserters and samplers waiting for each other raise."""


class ReplayService:
    """Inserts into and samples from one table, from any thread.

    A sample is valid until the table's number of `buffers` further ones have been taken: make the
    table with more buffers than samples are in use at a time.
    """

    def __init__(
        self,
        table: HostTable,
        limiter: RateLimiter | None = None,
        timeout: float = 60.0,
        durable: Path | str | None = None,
        grown: int = GROWN,
        behind: bool = False,
    ) -> None:
        """`behind`: changes are durable once `when_kept` says so, not when the call returns."""
        self.table = table
        self.limiter = limiter or RateLimiter()
        self._journal = None
        if durable is not None:
            self._journal = Journal(Path(durable), table, self.limiter, grown, behind)
        self.restored = None if self._journal is None else self._journal.restored
        """The state in which the durable folder was found."""
        self.epoch = time.time_ns() if self.restored is None else self.restored.epoch
        """Clients that know a different number have lost data they inserted."""
        self.timeout = timeout
        self._changed = threading.Condition()
        self._waiting = {"insert": 0, "sample": 0}
        self._wanted = {"insert": 1, "sample": 1}
        """Number of items that the last waiting insert and sample wanted."""
        self._moves = 0
        self._stuck_since = (-1, 0.0)
        self._inserters: int | None = None
        self._completed = table.completed
        self._closed = False

    @property
    def size(self) -> int:
        """Number of items that can be sampled."""
        with self._changed:
            return self.table.size

    @contextmanager
    def inserting(self) -> Generator[None]:
        """Registers an inserter; when the last one leaves, waiting samplers raise."""
        with self._changed:
            self._inserters = (self._inserters or 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._inserters = (self._inserters or 0) - 1
                self._changed.notify_all()

    def insert(
        self,
        rows: Any,
        ends: Any = None,
        valid: Any = None,
        final: Any = None,
        priorities: Any = None,
        envs: tuple[int, int] | None = None,
        broken: Any = None,
        timeout: float | None = None,
    ) -> None:
        """`HostTable.insert`, once the rate limiter allows it."""
        self.insert_steps(
            *self.table.incoming.steps(rows, ends, valid, final, priorities, envs, broken), timeout
        )

    def insert_steps(
        self, steps: IncomingSteps, first: int, last: int, timeout: float | None = None
    ) -> None:
        """`HostTable.insert_steps`, once the rate limiter allows it."""
        self._insert(steps, steps.valid_count, first, last, timeout)

    def insert_plain(
        self, plain: Plain, first: int, last: int, timeout: float | None = None
    ) -> None:
        """`HostTable.insert_plain`, once the rate limiter allows it."""
        self._insert(plain, plain.length * (last - first), first, last, timeout)

    def _insert(
        self, steps: IncomingSteps | Plain, count: int, first: int, last: int, timeout: float | None
    ) -> None:
        """Waits for the rate limiter, then inserts `count` steps; holds the lock meanwhile."""
        with self._changed:
            # An estimate: the exact number is known only after the insert.
            expected = self.table.items_of(count)
            if self._closed or not self.limiter.may_insert(expected):
                self._wait("insert", expected, lambda: self.limiter.may_insert(expected), timeout)
            if isinstance(steps, Plain):
                self.table.insert_plain(steps, first, last)
            else:
                self.table.insert_steps(steps, first, last)
            completed = self.table.completed
            # Items count when they are complete: an insert may complete several or none.
            self.limiter.insert(completed - self._completed)
            self._completed = completed
            if self._journal is not None:
                # Logged under the lock, so that the log has the table's order of operations.
                self._journal.insert(steps, first, last)
            self._moved()

    def sample(
        self, draws: Any, timeout: float | None = None, output: Output | None = None
    ) -> Sample:
        """`HostTable.sample`, once there are items and the rate limiter allows it."""
        found = self.sample_if_any(draws, timeout, output, wait=True)
        assert found is not None
        return found

    def sample_if_any(
        self, draws: Any, timeout: float | None, output: Output | None, wait: bool = False
    ) -> Sample | None:
        """Like `sample`, but without `wait` returns None while there are no items yet."""
        count = len(draws)
        with self._changed:
            self.table.check_batch(count)
            if not wait and (self.table.size == 0 or not self.limiter.filled):
                return None
            if self._closed or not self._may_sample(count):
                self._wait("sample", count, lambda: self._may_sample(count), timeout)
            sample = self.table.sample(draws, output)
            self.limiter.sample(count)
            if self._journal is not None:
                self._journal.sample(np.asarray(draws))
            self._moved()
            return sample

    def _may_sample(self, count: int) -> bool:
        return self.limiter.may_sample(count) and self.table.size > 0

    def update_priorities(self, keys: ItemKeys, priorities: Any) -> None:
        """`HostTable.update_priorities`."""
        with self._changed:
            self._refuse_if_closed()
            self.table.update_priorities(keys, priorities)
            if self._journal is not None:
                self._journal.update(keys, priorities)

    def when_kept(self, done: Callable[[UserError | None], None]) -> None:
        """Calls `done` once all changes so far are durable, with the error if they could not be
        written. May call it from another thread."""
        if self._journal is None:
            done(None)
        else:
            self._journal.when_kept(done)

    def counts(self) -> tuple[int, int, int]:
        """Number of items that can be sampled, ever inserted, and ever sampled."""
        with self._changed:
            return self.table.size, self.limiter.inserted, self.limiter.sampled

    def state(self) -> dict[str, Array]:
        """A copy of the table's contents with the limiter's counts: for a checkpoint."""
        with self._changed:
            self._refuse_if_closed()
            counts = np.array([self.limiter.inserted, self.limiter.sampled])
            return {**save(self.table), "limiter": counts}

    def load(self, state: Mapping[str, Array]) -> None:
        """Restores table and limiter from the result of `state`."""
        with self._changed:
            self._refuse_if_closed()
            held = {name: x for name, x in state.items() if name != "limiter"}
            # Raises before anything is changed.
            check_saved(self.table, held)
            if self._journal is not None:
                self._journal.move()
            load(self.table, held)
            self.table.streams.floor = None
            self.limiter.inserted, self.limiter.sampled = (int(x) for x in state["limiter"])
            self._completed = self.table.completed
            if self._journal is not None:
                self._journal.renew()
            self._moved()

    def close(self) -> None:
        """Ends every wait; later calls raise."""
        with self._changed:
            if self._journal is not None and not self._closed:
                self._journal.close()
            self._closed = True
            self._changed.notify_all()

    def _moved(self) -> None:
        # Counts progress, which tells a standstill from a slow run.
        self._moves += 1
        # Waking nobody still takes a call.
        if self._waiting["insert"] or self._waiting["sample"]:
            self._changed.notify_all()

    def _wait(
        self, side: str, count: int, ready: Callable[[], bool], timeout: float | None
    ) -> None:
        """Waits until `ready`; the caller holds the lock."""
        limit = self.timeout if timeout is None else timeout
        began = still_since = time.monotonic()
        moves = self._moves
        self._waiting[side] += 1
        self._wanted[side] = count
        try:
            while True:
                self._refuse_if_closed()
                if ready():
                    return
                now = time.monotonic()
                # Progress was made, or only one kind of caller waits: no deadlock so far.
                if moves != self._moves or not all(self._waiting.values()):
                    moves, still_since = self._moves, now
                self._refuse_if_alone(side, count)
                if now - still_since >= PATIENCE:
                    self._stuck_since = (self._moves, now)  # makes the other waiters raise as well
                    self._changed.notify_all()
                if self._stuck_since[0] == self._moves and began <= self._stuck_since[1]:
                    self._refuse_both()
                if now - began >= limit:
                    waited = f"Replay waited {limit:g} s to {side} {count} items"
                    self._refuse(waited, side, count)
                # Wake up regularly to detect a standstill.
                self._changed.wait(min(PATIENCE / 4, max(limit - (now - began), 0.001)))
        finally:
            self._waiting[side] -= 1

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise UserError("The replay service has been closed: make a new one to go on.")

    def _refuse_if_alone(self, side: str, count: int) -> None:
        if side == "sample" and self._inserters == 0:
            self._refuse("Replay has nobody left to insert", side, count)

    def _refuse_both(self) -> None:
        reason = self.limiter.explain(self._wanted["insert"], self._wanted["sample"])
        raise UserError(
            f"Replay stands still, as each side waits for the other: {reason[:-1]}. Give the "
            "limiter a larger tolerance, or insert and sample fewer items at a time."
        )

    def _refuse(self, why: str, side: str, count: int) -> None:
        inserting, sampling = (count, 1) if side == "insert" else (1, count)
        reason = self.limiter.explain(inserting, sampling)
        if side == "sample" and self.limiter.may_sample(count):
            reason = "sampling waits for a first complete item."
        raise UserError(f"{why}: {reason}")
