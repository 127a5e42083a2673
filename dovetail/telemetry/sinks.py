"""Where the scalars of a training go: metrics.csv, or any other sink.

The training loop hands them to a `MetricsWriter`, whose thread writes them to every sink: neither a
slow disk nor an import ever holds up a step.
"""

import contextlib
import csv
import errno
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
"""The columns with which every metrics.csv begins."""

GATHERED = 1.0
"""Seconds for which records are gathered before they are written together: while they are written,
a core does not train, and a program that trains on all of them waits for that one."""

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Sink(Protocol):
    """Something that scalars are written to, always from one thread.

    A `UserError` that it raises stops the training; any other exception only stops the sink.
    """

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Takes the scalars known after `step` environment steps."""
        ...

    def close(self) -> None:
        """Flushes and releases what the sink holds."""
        ...


@runtime_checkable
class ArraySink(Protocol):
    """A sink that also shows how the numbers of arrays are spread."""

    def write_arrays(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Takes arrays as they are after `step` environment steps."""
        ...


class CsvSink:
    """One row per write. A column may appear at any time: earlier rows get an empty cell."""

    def __init__(self, path: str | Path, append: bool = False, after: int | None = None) -> None:
        """`append` keeps the rows that are there, except those past `after` environment steps."""
        self._path = Path(path)
        self._columns = list(FIRST_COLUMNS)
        rows: list[list[str]] = []
        if append and self._path.exists():
            rows = self._read()
            if after is not None:
                steps = self._columns.index("env_steps")
                rows = [row for row in rows if not row[steps] or float(row[steps]) <= after]
        self._rewrite(rows)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends a row, and flushes it."""
        known = {"env_steps": step, **scalars}
        new = [name for name in known if name not in self._columns]
        if new:
            rows = self._read()
            self._file.close()
            self._columns += new
            self._rewrite(rows)
        self._append(_line(_cell(known.get(name, math.nan)) for name in self._columns))

    def close(self) -> None:
        """Releases the file; every row is in it already."""
        self._file.close()

    def _append(self, line: str) -> None:
        """Writes the whole line, or takes back what the disk had room for."""
        end, data = self._file.seek(0, io.SEEK_END), line.encode()
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            if error.errno in _DISK_FULL:
                raise write_error(self._path, error) from error
            raise

    def _read(self) -> list[list[str]]:
        """The file's whole rows, a half-written last one left out; takes over its columns."""
        text = self._path.read_text(encoding="utf-8")
        header, *rows = list(csv.reader(text[: text.rfind("\n") + 1].splitlines())) or [[]]
        order = [*self._columns, *(name for name in header if name not in self._columns)]
        if missing := [name for name in self._columns if header and name not in header]:
            raise UserError(
                f"{self._path} has no column {missing[0]!r}: it is no metrics file of a run."
            )
        places = [header.index(name) for name in order if name in header]
        self._columns = order
        return [[row[place] if place < len(row) else "" for place in places] for row in rows]

    def _rewrite(self, rows: list[list[str]]) -> None:
        """Puts the header and `rows`, filled up to its length, in place of the file."""
        width = len(self._columns)
        lines = [_line(row + [""] * (width - len(row))) for row in [self._columns, *rows]]
        write_atomically(self._path, "".join(lines))
        self._file = self._path.open("ab", buffering=0)


def _line(cells: Iterable[str]) -> str:
    """Cells as one line of CSV, quoted where a name has a comma."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(list(cells))
    return text.getvalue()


def _cell(value: float) -> str:
    """A number that reads back as the same float; nothing for NaN, whole numbers without a dot."""
    number = float(value)
    if math.isnan(number):
        return ""
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)


class MetricsWriter:
    """Writes scalars to sinks from a thread of its own; `record` never waits for them."""

    def __init__(
        self,
        sinks: Iterable[Sink],
        on_failure: Callable[[str], None] | None = None,
        capacity: int = 1024,
        patience: float = 10.0,
    ) -> None:
        """`on_failure` is told, in a sentence and from the thread, what could not be written.
        Once it is closed, sinks have `patience` seconds for what is waiting, unless told."""
        self.failures: list[str] = []
        """A sentence for each sink that failed, and for what was dropped."""
        self.dropped = 0
        """How many records were dropped, the oldest first, because the sinks did not keep up."""
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
        """Hands over the scalars known after `step` environment steps, arrays of one included."""
        self._hand_over(step, scalars, False)

    def record_arrays(self, step: int, arrays: Mapping[str, Any]) -> None:
        """Hands over arrays, for those sinks that show how their numbers are spread."""
        self._hand_over(step, arrays, True)

    def _hand_over(self, step: int, what: Mapping[str, Any], arrays: bool) -> None:
        self._raise_fatal()
        with self._changed:
            if len(self._waiting) == self._capacity:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append((step, dict(what), arrays))
            if len(self._waiting) == 1 or self._crowded:
                self._changed.notify()

    def close(self, timeout: float | None = None) -> None:
        """Writes what is waiting, within `timeout` seconds, and closes the sinks."""
        timeout = self._patience if timeout is None else timeout
        with self._changed:
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
        """Whether so many records wait that some will be dropped if they are not written."""
        return 2 * len(self._waiting) >= self._capacity

    def _gather(self) -> bool:
        """Waits for records; returns whether there are any, which there are not once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            self._changed.wait_for(lambda: self._closing or self._crowded, GATHERED)
            return bool(self._waiting)

    def _work(self) -> None:
        """The thread: writes until closed and empty."""
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
        """Runs `action`; if it fails, gives the sink up and says so, once."""
        try:
            action(*arguments)
        except Exception as error:
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
        """Raises, once, what a sink could not do without."""
        fatal, self._fatal = self._fatal, None
        if fatal is not None:
            raise fatal
