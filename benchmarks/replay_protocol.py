"""The replay work that every contestant does, and how it answers: JSON on its last line.

Rows are inserted 64 at a time into a full table and sampled 256 at a time, each transition with
what was seen after it; where priorities count, every sample's are updated. Inserting and sampling
are timed apart, the best of some rounds counts, and what was read is touched by nobody.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

INSERTED, SAMPLED = 64, 256
EXPONENT = 0.6
ROUNDS = 7


@dataclass(frozen=True)
class Work:
    """What is stored and how it is sampled."""

    image: bool
    prioritized: bool
    seconds: float
    """For each round of inserting and of sampling."""

    @property
    def capacity(self) -> int:
        return 20_000 if self.image else 100_000

    @property
    def shape(self) -> tuple[int, ...]:
        return (84, 84, 4) if self.image else (8,)

    @property
    def dtype(self) -> Any:
        return np.uint8 if self.image else np.float32


def parse_work() -> Work:
    parser = argparse.ArgumentParser()
    parser.add_argument("--image", action="store_true")
    parser.add_argument("--prioritized", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    return Work(options.image, options.prioritized, options.seconds)


def observations(work: Work, count: int = 16) -> list[np.ndarray[Any, Any]]:
    """Batches [65, …] of what 64 steps of one environment see; images are stacks of 4 frames."""
    random = np.random.default_rng(0)
    if not work.image:
        return [random.normal(size=(INSERTED + 1, 8)).astype(np.float32) for _ in range(count)]
    frames = random.integers(0, 256, (count * INSERTED + 4, 84, 84), np.uint8)
    made: list[np.ndarray[Any, Any]] = []
    for batch in range(count):
        steps = batch * INSERTED + np.arange(INSERTED + 1)
        made.append(np.ascontiguousarray(np.stack([frames[steps + k] for k in range(4)], axis=-1)))
    return made


def row(work: Work) -> dict[str, np.ndarray[Any, Any]]:
    """A row of ours, empty."""
    return {
        "observation": np.zeros(work.shape, work.dtype),
        "action": np.zeros((), np.int32),
        "reward": np.zeros((), np.float32),
        "terminated": np.zeros((), bool),
    }


def steps(work: Work) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Inserts of ours [1, 64, …]: one step of 64 environments."""
    small = {
        name: np.zeros((1, INSERTED, *x.shape), x.dtype)
        for name, x in row(work).items()
        if name != "observation"
    }
    return [{"observation": x[None, :INSERTED], **small} for x in observations(work)]


def rate(call: Callable[[], Any], items: int, seconds: float) -> float:
    """Items per second of a call, the best of some rounds."""
    call()
    best = 0.0
    for _ in range(ROUNDS):
        calls, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds:
            call()
            calls += 1
        best = max(best, calls * items / took)
    return best


def answer(
    work: Work,
    insert: Callable[[], Any],
    sample: Callable[[], Any] | list[Callable[[], Any]],
    stored: float | None = None,
) -> None:
    """Fills the table, measures, and prints the answer; `stored` is bytes per transition. Of
    several ways to sample the fastest counts."""
    for _ in range(work.capacity // INSERTED + 1):
        insert()
    ways = sample if isinstance(sample, list) else [sample]
    found = {
        "inserts_per_s": rate(insert, INSERTED, work.seconds),
        "samples_per_s": max(rate(way, SAMPLED, work.seconds) for way in ways),
        "bytes_per_transition": stored,
    }
    print(json.dumps(found))
