"""How long a user waits: `dovetail --help`, and from `dovetail train` to the first update.

    python -m benchmarks.startup [--repeats N]

The first update is there when the run's metrics.csv has its first row. Cold means an empty compile
cache; warm is the same command again.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMANDS = {
    "local": ("train", "ppo", "--env", "gymnasium:CartPole-v1", "--policy", "local"),
    "fused": ("train", "ppo", "--env", "dovetail:CartPole-v1", "--policy", "fused"),
}
TARGETS = {"help": 0.5, "cold": 6.0, "warm": 3.0}
GIVE_UP = 120.0


def dovetail(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dovetail", *arguments]


def time_help() -> float:
    began = time.perf_counter()
    subprocess.run(dovetail("--help"), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def time_first_update(command: tuple[str, ...], cache: Path) -> float:
    """Seconds until the first row of metrics; the run is then ended."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        options = ("--steps", "1_000_000_000", "--run", str(run), "--display", "none")
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        began = time.perf_counter()
        process = subprocess.Popen(
            dovetail(*command, *options), env=environment, stdout=subprocess.DEVNULL
        )
        try:
            while not has_row(run / "metrics.csv"):
                if process.poll() is not None or time.perf_counter() - began > GIVE_UP:
                    raise SystemExit(f"dovetail {' '.join(command)} came to no first update.")
                time.sleep(0.005)
            return time.perf_counter() - began
        finally:
            process.kill()
            process.wait()


def has_row(metrics: Path) -> bool:
    try:
        return metrics.read_bytes().count(b"\n") >= 2
    except FileNotFoundError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    repeats = 2 if options.quick else options.repeats
    times: dict[str, list[float]] = {"help": [time_help() for _ in range(2 * repeats)]}
    for name, command in COMMANDS.items():
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as cache:
                for kind in ("cold", "warm"):
                    seconds = time_first_update(command, Path(cache))
                    times.setdefault(f"{name} {kind}", []).append(seconds)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, median in medians.items():
        target = TARGETS[name.split()[-1]]
        met = "reached" if median <= target else "MISSED"
        print(f"{name:12} median {median:6.2f} s of {len(times[name])}; target {target} s: {met}")
    print(json.dumps({"medians": medians, "times": times}))


if __name__ == "__main__":
    main()
