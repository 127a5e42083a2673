"""Sinks for a run's scalars: metrics.csv and others.

The training loop passes scalars to a `MetricsWriter`, whose thread writes them to every sink, so
that neither a slow disk nor an import delays a step.
"""

import contextlib
import csv
import io
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dovetail.errors import UserError
from dovetail.run.folder import write_atomically, write_error

FIRST_COLUMNS = ("time_s", "env_steps", "updates")
"""The first columns of every metrics.csv."""

GATHERED = 1.0
"""Seconds for which records are collected before they are written together. Writing takes a core
from training, and a program that trains on all cores waits for the slowest."""

LATE = 10_000
"""Maximum number of rows that wait for room on the disk; the oldest are dropped."""


class SinkPaused(UserError):
    """A sink cannot write now, and tries again with the next record."""


class DamagedMetrics(UserError):
    """A metrics.csv holds no rows of numbers."""


class Sink(Protocol):
    """A destination of scalars; all calls come from one thread.

    A `UserError` stops training, `SinkPaused` nothing; any other exception stops only the sink.
    """

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the scalars after `step` environment steps."""
        ...

    def close(self) -> None:
        """Flushes and releases the sink's resources."""
        ...


@runtime_checkable
class ArraySink(Protocol):
    """A sink that also shows histograms of arrays."""

    def write_arrays(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes the arrays after `step` environment steps."""
        ...


class CsvSink:
    """Writes one CSV row per call. New columns may appear later; earlier rows get empty cells."""

    def __init__(self, path: str | Path, append: bool = False, after: int | None = None) -> None:
        """`append` keeps existing rows, except those beyond `after` environment steps."""
        self._path = Path(path)
        self._columns = list(FIRST_COLUMNS)
        self._file: Any = None
        self._late: deque[dict[str, float]] = deque(maxlen=LATE)
        """Rows that could not be written yet."""
        rows: list[list[str]] = []
        if append and self._path.exists():
            try:
                rows = self._read()
                steps = self._columns.index("env_steps")
                limit = math.inf if after is None else after
                rows = [row for row in rows if not row[steps] or float(row[steps]) <= limit]
            except ValueError as error:
                raise DamagedMetrics(f"{self._path} is damaged ({error}).") from error
        self._rewrite(rows)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends a row; the file is unbuffered."""
        self._late.append({"env_steps": step, **scalars})
        try:
            while self._late:
                self._write_row(self._late[0])
                self._late.popleft()
        except OSError as error:
            raise SinkPaused(str(write_error(self._path, error))) from error

    def _write_row(self, known: Mapping[str, float]) -> None:
        new = [name for name in known if name not in self._columns]
        if new:
            rows, before = self._read(), list(self._columns)
            self._columns += new
            try:
                self._rewrite(rows)
            except UserError as error:
                self._columns = before
                raise SinkPaused(str(error)) from error
        self._append(_line(_cell(known.get(name, math.nan)) for name in self._columns))

    def close(self) -> None:
        """Closes the file; rows that could not be written are lost."""
        self._file.close()
        if self._late:
            raise SinkPaused(f"{self._path} lacks {len(self._late)} rows: there was no room.")

    def _append(self, line: str) -> None:
        """Writes the whole line, or truncates a partial one if the disk is full."""
        end, data = self._file.seek(0, io.SEEK_END), line.encode()
        try:
            # An unbuffered file may write a part.
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise

    def _read(self) -> list[list[str]]:
        """Reads the complete rows, without a partial last one; adopts the file's columns."""
        text = self._path.read_text(encoding="utf-8")
        header, *rows = list(csv.reader(text[: text.rfind("\n") + 1].splitlines())) or [[]]
        order = [*self._columns, *(name for name in header if name not in self._columns)]
        if missing := [name for name in self._columns if header and name not in header]:
            raise DamagedMetrics(
                f"{self._path} has no column {missing[0]!r}: it is no metrics file of a run."
            )
        places = [header.index(name) for name in order if name in header]
        self._columns = order
        return [[row[place] if place < len(row) else "" for place in places] for row in rows]

    def _rewrite(self, rows: list[list[str]]) -> None:
        """Replaces the file by the header and `rows`, padded to the number of columns."""
        width = len(self._columns)
        lines = [_line(row + [""] * (width - len(row))) for row in [self._columns, *rows]]
        write_atomically(self._path, "".join(lines))
        before, self._file = self._file, self._path.open("ab", buffering=0)
        if before is not None:
            before.close()


def _line(cells: Iterable[str]) -> str:
    """Formats cells as one line of CSV, quoted where necessary."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(list(cells))
    return text.getvalue()


def _cell(value: float) -> str:
    """Formats a number so that it reads back as the same float; NaN as an empty cell, integers
    without a decimal point."""
    number = float(value)
    if math.isnan(number):
        return ""
    # Beyond 2⁵³ an integer is no longer the only one that reads back as this float.
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)


class MetricsWriter:
    """Writes scalars to sinks in a background thread; `record` never blocks."""

    def __init__(
        self,
        sinks: Iterable[Sink],
        on_failure: Callable[[str], None] | None = None,
        capacity: int = 1024,
        patience: float = 10.0,
    ) -> None:
        """`on_failure` is called with a sentence, from the thread, if something could not be
        written. `patience` is the default time limit of `close`, in seconds."""
        self.failures: list[str] = []
        """A sentence for each failed sink and for dropped records."""
        self.dropped = 0
        """Number of records dropped, oldest first, because the sinks were too slow."""
        self._sinks = list(sinks)
        self._on_failure = on_failure
        self._capacity, self._patience = capacity, patience
        self._waiting: deque[tuple[int, dict[str, Any], bool]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._fatal: UserError | None = None
        self._thread = threading.Thread(target=self._work, name="dovetail-recorder", daemon=True)
        self._thread.start()

    def record(self, step: int, scalars: Mapping[str, float]) -> None:
        """Queues the scalars after `step` environment steps; one-element arrays are allowed."""
        self._hand_over(step, scalars, False)

    def record_arrays(self, step: int, arrays: Mapping[str, Any]) -> None:
        """Queues arrays for the sinks that show histograms."""
        self._hand_over(step, arrays, True)

    def _hand_over(self, step: int, what: Mapping[str, Any], arrays: bool) -> None:
        """Queues a record, or drops the oldest if the queue is full; never waits for a sink."""
        self._raise_fatal()
        with self._changed:
            if len(self._waiting) == self._capacity:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append((step, dict(what), arrays))
            # Wake the thread for a first record or a filling queue; otherwise it collects.
            if len(self._waiting) == 1 or self._crowded:
                self._changed.notify()

    def close(self, timeout: float | None = None) -> None:
        """Writes the queued records, within `timeout` seconds, and closes the sinks."""
        timeout = self._patience if timeout is None else timeout
        with self._changed:
            # A second `close` must not report the same losses again.
            already, self._closing = self._closing, True
            self._changed.notify()
        self._thread.join(timeout)
        if not already and self._thread.is_alive():
            self._fail(
                f"The metrics were not all written within {timeout:g} s: "
                f"{len(self._waiting)} records are missing."
            )
        if not already and self.dropped:
            self._fail(
                f"{self.dropped} records of metrics were dropped, because writing them was slower "
                "than the training."
            )
        self._raise_fatal()

    @property
    def _crowded(self) -> bool:
        """Whether the queue is at least half full."""
        return 2 * len(self._waiting) >= self._capacity

    def _gather(self) -> bool:
        """Waits for records; returns False once closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            # Collect more records, unless the queue fills up.
            self._changed.wait_for(lambda: self._closing or self._crowded, GATHERED)
            return bool(self._waiting)

    def _work(self) -> None:
        """The writer thread: writes until closed and empty."""
        while self._gather():
            while self._waiting:
                with self._changed:
                    step, found, arrays = self._waiting.popleft()
                if arrays:
                    self._write_arrays(step, found)
                else:
                    self._write(step, found)
        for sink in list(self._sinks):
            self._guarded(sink, sink.close)

    def _write(self, step: int, scalars: Mapping[str, Any]) -> None:
        try:
            floats = {name: float(value) for name, value in scalars.items()}
        except (TypeError, ValueError) as error:
            self._fail(f"A record of metrics was left out, it holds no plain numbers: {error}.")
            return
        for sink in list(self._sinks):
            self._guarded(sink, sink.write, step, floats)

    def _write_arrays(self, step: int, arrays: Mapping[str, Any]) -> None:
        here = {name: np.asarray(array) for name, array in arrays.items()}
        for sink in [sink for sink in self._sinks if isinstance(sink, ArraySink)]:
            self._guarded(sink, sink.write_arrays, step, here)

    def _guarded(self, sink: Sink, action: Callable[..., None], *arguments: object) -> None:
        """Runs `action`; if it fails, removes the sink and reports the failure once."""
        try:
            action(*arguments)
        except SinkPaused as error:
            self._fail(str(error))
        except Exception as error:
            # A broken sink would otherwise fail, and be reported, with every record.
            self._sinks.remove(sink)
            with contextlib.suppress(Exception):
                sink.close()
            if isinstance(error, UserError):
                self._fatal = error
                return
            why = f"{type(error).__name__}: {error}"
            self._fail(f"{type(sink).__name__} stopped ({why}): the training goes on without it.")

    def _fail(self, sentence: str) -> None:
        """Reports `sentence`, unless it was reported before."""
        if sentence not in self.failures:
            self.failures.append(sentence)
            if self._on_failure is not None:
                self._on_failure(sentence)

    def _raise_fatal(self) -> None:
        """Raises a sink's `UserError`, once; called in the caller's thread."""
        fatal, self._fatal = self._fatal, None
        if fatal is not None:
            raise fatal
