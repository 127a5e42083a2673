"""How the time of prioritized sampling grows, from 10 thousand items to 10 million.

    python -m benchmarks.replay_growth [--quick]

Samples of 256 with their priorities updated, from full tables of small rows, all in turn; a round
is timed by the processor's time, and the best of each table counts. Growth is logarithmic if the
times lie on a line over the logarithm of the size: no time may be more than 15 % above the line
that fits best, and the last tenfold may cost at most half more than a tenfold on average. (Larger
tables leave the processor's caches one after the other, so the line is a rough one.) The plot goes
to benchmarks/results/replay-growth.svg.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.replay import HostTable, Prioritized, Table, Transitions

ROOT = Path(__file__).resolve().parent
SIZES = (10_000, 31_623, 100_000, 316_228, 1_000_000, 3_162_278, 10_000_000)
SAMPLED, ROUNDS = 256, 15
ABOVE, LAST = 1.15, 1.5


def filled(capacity: int) -> HostTable:
    """A full table of rows of one number."""
    table = HostTable(
        Table(Transitions(1), capacity, Prioritized(0.6)), {"x": np.zeros((), np.float32)}, 1
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


def microseconds(table: HostTable, calls: int, random: np.random.Generator) -> float:
    """Of a sample and the update of its priorities."""
    draws = random.random((calls, SAMPLED), np.float32)
    began = time.process_time()
    for row in draws:
        sample = table.sample(row)
        table.update_priorities(sample.keys, row)
    return 1e6 * (time.process_time() - began) / calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    tables = {size: filled(size) for size in SIZES[: 3 if quick else None]}
    random = np.random.default_rng(1)
    rounds = [
        {size: microseconds(table, 50 if quick else 200, random) for size, table in tables.items()}
        for _ in range(3 if quick else ROUNDS)
    ]
    found = {size: min(row[size] for row in rounds) for size in tables}
    tens = np.log10(list(found))
    slope, start = np.polyfit(tens, list(found.values()), 1)
    for size, line in zip(found, start + slope * tens, strict=True):
        print(f"{size:>12,} items: {found[size]:7.1f} µs for {SAMPLED}; the line says {line:7.1f}")
    above = float(max(np.array(list(found.values())) / (start + slope * tens)))
    *_, before, last = (found[size] for size in sorted(found)[::2])
    most = (last - before) / slope
    met = above <= ABOVE and most <= LAST
    print(
        f"{slope:.1f} µs for every tenfold, {most:.2f} of it for the last; at most {above:.2f} "
        f"of the line: {'reached' if met else 'MISSED'}"
    )
    result: dict[str, Any] = {
        "microseconds": found,
        "line": [float(start), float(slope)],
        "above": above,
        "last_tenfold": float(most),
        "met": bool(met),
    }
    plot(found, float(start), float(slope))
    print(json.dumps(result))


def plot(found: dict[int, float], start: float, slope: float) -> None:
    """The times over the number of items."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    sizes = np.array(list(found))
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(sizes, list(found.values()), "o-", label="measured")
    line = f"{start:.0f} + {slope:.0f} log₁₀(items)"
    axes.plot(sizes, start + slope * np.log10(sizes), "--", label=line)
    axes.set(xscale="log", xlabel="items in the table", ylabel=f"µs for a sample of {SAMPLED}")
    axes.set_ylim(bottom=0)
    axes.legend()
    folder = ROOT / "results"
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / "replay-growth.svg", bbox_inches="tight")


if __name__ == "__main__":
    main()
