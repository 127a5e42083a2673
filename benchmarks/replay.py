"""Replay in one process against cpprb, flashbax and torchrl, in turn.

    python -m benchmarks.replay [--repeats N] [--quick] [--small] [--peers NAME …]

Four kinds of work: small and image observations, uniform and prioritized. A ratio is taken in each
round against the best peer of that round, and its median counts.
"""

import argparse
import json
import statistics
from typing import Any

from benchmarks.interpreters import interpreter
from benchmarks.run import run_json

TARGET = 1.5
STORED_TARGET = 0.3
RAW = 84 * 84 * 4
OURS = ("dovetail", "benchmarks.replay_ours")
PEERS = {
    name: (name, f"benchmarks.peers.{name}_replay") for name in ("cpprb", "flashbax", "torchrl")
}
UNABLE = "torchrl"
"""Its sum tree is not in its wheel for this torch: it takes no part where priorities count."""
WORKS: dict[str, tuple[str, ...]] = {
    "small uniform": (),
    "small prioritized": ("--prioritized",),
    "image uniform": ("--image",),
    "image prioritized": ("--image", "--prioritized"),
}
MEASURES = ("inserts_per_s", "samples_per_s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--small", action="store_true", help="leave the images out")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    seconds = 0.1 if options.quick else 0.5
    contestants = {"dovetail": OURS, **{name: PEERS[name] for name in options.peers}}
    results: dict[str, Any] = {}
    for name in contestants:
        interpreter(contestants[name][0])  # installs before anything is timed
    for work, flags in WORKS.items():
        if not (options.small and "--image" in flags):
            able = {
                n: c for n, c in contestants.items() if "--prioritized" not in flags or n != UNABLE
            }
            results[work] = compare(work, flags, able, repeats, seconds, TARGET)
            if "--image" in flags:
                results[work]["stored"] = stored(work, results[work])
    print(json.dumps(results))


def compare(
    work: str,
    flags: tuple[str, ...],
    contestants: dict[str, tuple[str, str]],
    repeats: int,
    seconds: float,
    target: float,
) -> dict[str, Any]:
    """Every contestant in turn; the medians, and ours against the best of the others."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, (python, module) in contestants.items():
            command = [str(interpreter(python)), "-m", module, "--seconds", str(seconds), *flags]
            answers[name].append(run_json(command))
    found: dict[str, Any] = {"answers": answers}
    for measure in MEASURES:
        medians = {
            name: statistics.median(a[measure] for a in rows) for name, rows in answers.items()
        }
        ratio = statistics.median(
            ours[measure]
            / max(answers[name][at][measure] for name in answers if name != "dovetail")
            for at, ours in enumerate(answers["dovetail"])
        )
        sign = "reached" if ratio >= target else "MISSED"
        listed = ", ".join(f"{name} {value:,.0f}" for name, value in medians.items())
        print(
            f"{work}, {measure}: {listed}: {ratio:.2f} × the best peer; target {target:g}: {sign}",
            flush=True,
        )
        found[measure] = {"medians": medians, "ratio": ratio, "met": ratio >= target}
    return found


def stored(work: str, found: dict[str, Any]) -> dict[str, Any]:
    """What a stored image takes of a raw stack."""
    share = found["answers"]["dovetail"][0]["bytes_per_transition"] / RAW
    sign = "reached" if share <= STORED_TARGET else "MISSED"
    print(f"{work}: {share:.3f} of a raw stack per transition; target {STORED_TARGET}: {sign}")
    return {"share": share, "met": share <= STORED_TARGET}


if __name__ == "__main__":
    main()
