"""Replay in another process against dm-reverb, in turn.

    python -m benchmarks.replay_service [--repeats N] [--quick] [--small]

The same four kinds of work as in one process; one client, which inserts, and then samples.
"""

import argparse
import json
from typing import Any

from benchmarks.interpreters import interpreter
from benchmarks.replay import WORKS, compare

TARGET = 3.0
CONTESTANTS = {
    "dovetail": ("dovetail", "benchmarks.replay_service_ours"),
    "reverb": ("reverb", "benchmarks.peers.reverb_service"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--small", action="store_true", help="leave the images out")
    options = parser.parse_args()
    for python, _ in CONTESTANTS.values():
        interpreter(python)  # installs before anything is timed
    repeats = 1 if options.quick else options.repeats
    seconds = 0.1 if options.quick else 0.5
    results: dict[str, Any] = {
        work: compare(work, flags, CONTESTANTS, repeats, seconds, TARGET)
        for work, flags in WORKS.items()
        if not (options.small and "--image" in flags)
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
