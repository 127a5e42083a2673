"""How long a user waits: `dovetail --help`, and from `dovetail train` to the first update.

    python -m benchmarks.startup [--repeats N]

The first update is there when the run's metrics.csv has its first row. Cold means an empty compile
cache; warm is the same command again. The processor's seconds are shown too: on a busy machine only
they mean anything.
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
    "local": (
        "train",
        "ppo",
        "--env",
        "gymnasium:CartPole-v1",
        "--strategy",
        "local",
        "--num-envs",
        "8",
    ),
    "fused": (
        "train",
        "ppo",
        "--env",
        "dovetail:CartPole-v1",
        "--strategy",
        "fused",
        "--num-envs",
        "64",
    ),
}
TARGETS = {"help": 0.5, "cold": 6.0, "warm": 3.0}
GIVE_UP = 120.0


def dovetail(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dovetail", *arguments]


def processor_seconds(process: int) -> float:
    """What a process has used of all cores so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def time_help() -> tuple[float, float]:
    before = os.times()
    subprocess.run(dovetail("--help"), check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    used = after.children_user + after.children_system
    return after.elapsed - before.elapsed, used - before.children_user - before.children_system


def time_first_update(command: tuple[str, ...], cache: Path) -> tuple[float, float]:
    """(wall, processor) seconds until the first row of metrics; the run is then ended."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        options = ("--total-steps", "1_000_000_000", "--run", str(run), "--quiet")
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
            return time.perf_counter() - began, processor_seconds(process.pid)
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
    times: dict[str, list[tuple[float, float]]] = {
        "help": [time_help() for _ in range(2 * repeats)]
    }
    for name, command in COMMANDS.items():
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as cache:
                for kind in ("cold", "warm"):
                    seconds = time_first_update(command, Path(cache))
                    times.setdefault(f"{name} {kind}", []).append(seconds)
    medians = {}
    for name, pairs in times.items():
        wall, used = (statistics.median(column) for column in zip(*pairs, strict=True))
        medians[name] = wall
        target = TARGETS[name.split()[-1]]
        met = "reached" if wall <= target else "MISSED"
        print(
            f"{name:12} median {wall:6.2f} s of {len(pairs)} ({used:.2f} s of processor); "
            f"target {target} s: {met}"
        )
    print(json.dumps({"medians": medians, "times": times}))


if __name__ == "__main__":
    main()
