"""What it costs that nothing acknowledged is lost: inserts per second of durable tables.

    python -m benchmarks.replay_durable [--repeats N] [--quick]

Inserts of 64 small rows and of 64 images into a server, and into a table in the same process, each
with a log and without, in turn; the median of the rounds' ratios counts. The log is written to a
folder in benchmarks/results/, on whatever disk that is.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import replay_protocol as p
from dovetail.replay import (
    History,
    HostTable,
    ReplayServer,
    ReplayService,
    Table,
    Transitions,
)

ROOT = Path(__file__).resolve().parent
TARGET = 0.7
"""A log costs at most 30 % of the throughput."""
Insert = Callable[[Any, Any], None]


@contextmanager
def server(work: p.Work, durable: Path | None) -> Iterator[tuple[Insert, Callable[[], None]]]:
    with (
        ReplayServer(table(work), p.row(work), p.INSERTED, durable=durable) as made,
        made.client() as client,
    ):
        yield client.insert, client.flush


@contextmanager
def service(work: p.Work, durable: Path | None) -> Iterator[tuple[Insert, Callable[[], None]]]:
    made = ReplayService(HostTable(table(work), p.row(work), p.INSERTED), durable=durable)
    yield made.insert, lambda: None
    made.close()


def table(work: p.Work) -> Table:
    history = (History("observation", 4, -1),) if work.image else ()
    return Table(Transitions(1), work.capacity, history=history)


def rates(where: Any, work: p.Work, repeats: int) -> list[tuple[float, float]]:
    """Rows per second, without a log and with one, in turn."""
    folder = Path(tempfile.mkdtemp(dir=results()))
    ends = np.zeros((1, p.INSERTED), bool)
    batches = cycle(p.steps(work))
    try:
        with where(work, None) as plain, where(work, folder) as durable:

            def rate(insert: Insert, flush: Callable[[], None]) -> float:
                calls, began = 0, time.perf_counter()
                while time.perf_counter() - began < work.seconds:
                    insert(next(batches), ends)
                    calls += 1
                flush()
                return calls * p.INSERTED / (time.perf_counter() - began)

            for way in (plain, durable):
                for _ in range(work.capacity // p.INSERTED + 1):
                    way[0](next(batches), ends)
                way[1]()
            return [(rate(*plain), rate(*durable)) for _ in range(repeats)]
    finally:
        shutil.rmtree(folder)


def results() -> Path:
    (ROOT / "results").mkdir(exist_ok=True)
    return ROOT / "results"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    repeats, seconds = (3, 0.2) if options.quick else (options.repeats, 0.5)
    found: dict[str, Any] = {}
    for name, where in (("a server", server), ("one process", service)):
        for image in (False, True):
            rounds = rates(where, p.Work(image, False, seconds), repeats)
            ratio = statistics.median(durable / plain for plain, durable in rounds)
            plain, durable = (statistics.median(column) for column in zip(*rounds, strict=True))
            work = f"{name}, {'images' if image else 'small rows'}"
            sign = "reached" if ratio >= TARGET else "MISSED"
            print(
                f"{work}: {plain:,.0f} rows/s, durable {durable:,.0f}: {ratio:.2f}; "
                f"target {TARGET}: {sign}",
                flush=True,
            )
            found[work] = {"rounds": rounds, "ratio": ratio, "met": ratio >= TARGET}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
