"""How the time of prioritised sampling grows, from 10 thousand items to 10 million.

    python -m benchmarks.replay_growth [--quick]

Samples of 256 with their priorities updated, from a full table of small rows. The plot goes to
benchmarks/results/replay-growth.svg, with the logarithm that the smallest table would lead to.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.replay import HostTable, Prioritised, Table, Transitions

ROOT = Path(__file__).resolve().parent
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
SAMPLED, ROUNDS = 256, 7


def filled(capacity: int) -> HostTable:
    """A full table of rows of one number."""
    table = HostTable(
        Table(Transitions(1), capacity, Prioritised(0.6)), {"x": np.zeros((), np.float32)}, 1
    )
    random = np.random.default_rng(0)
    left = capacity + 1
    while left > 0:
        count = min(left, capacity // 4)
        priorities = random.random((count, 1), np.float32)
        table.insert({"x": np.zeros((count, 1), np.float32)}, priorities=priorities)
        left -= count
    assert table.size == capacity
    return table


def microseconds(table: HostTable, calls: int) -> float:
    """Of a sample and the update of its priorities, the best of some rounds."""
    random = np.random.default_rng(1)
    priorities = random.random((64, SAMPLED), np.float32)
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for call in range(calls):
            sample = table.sample(random.random(SAMPLED, np.float32))
            table.update_priorities(sample.keys, priorities[call % 64])
        best = min(best, (time.perf_counter() - began) / calls)
    return 1e6 * best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    found: dict[int, float] = {}
    for capacity in SIZES[: 2 if quick else None]:
        found[capacity] = microseconds(filled(capacity), 50 if quick else 500)
        print(f"{capacity:>12,} items: {found[capacity]:8.1f} µs for {SAMPLED}", flush=True)
    first = SIZES[0]
    last = max(found)
    allowed = found[first] * np.log(last) / np.log(first)
    met = found[last] <= allowed
    print(
        f"{last:,} items: {found[last]:.0f} µs; the logarithm allows {allowed:.0f}: "
        f"{'reached' if met else 'MISSED'}"
    )
    result: dict[str, Any] = {"microseconds": found, "allowed": allowed, "met": bool(met)}
    plot(found)
    print(json.dumps(result))


def plot(found: dict[int, float]) -> None:
    """The times over the capacity."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    sizes = np.array(list(found))
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(sizes, list(found.values()), "o-", label="measured")
    axes.plot(
        sizes, found[SIZES[0]] * np.log(sizes) / np.log(SIZES[0]), "--", label="the logarithm"
    )
    axes.set(xscale="log", xlabel="items in the table", ylabel=f"µs for a sample of {SAMPLED}")
    axes.set_ylim(bottom=0)
    axes.legend()
    folder = ROOT / "results"
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / "replay-growth.svg", bbox_inches="tight")


if __name__ == "__main__":
    main()
