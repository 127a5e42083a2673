"""Whether memory stays flat: the resident size of a long run, sampled every second.

    python -m benchmarks.memory [--minutes N]

Growth compares the last ten seconds with the ten after the first minute, by their medians.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMANDS = {
    "local": ("--env", "gymnasium:CartPole-v1", "--strategy", "local", "--num-envs", "8"),
    "fused": ("--env", "dovetail:CartPole-v1", "--strategy", "fused", "--num-envs", "64"),
}
TARGET = 0.02
SETTLED = 60
WINDOW = 10


def resident_megabytes(process: int) -> float:
    for text in Path(f"/proc/{process}/status").read_text().splitlines():
        if text.startswith("VmRSS:"):
            return int(text.split()[1]) / 1024
    raise ProcessLookupError(f"process {process} has no memory any more")


def sample(command: tuple[str, ...], seconds: float) -> list[float]:
    """The resident size, in MB, every second of a run that would go on for much longer."""
    with tempfile.TemporaryDirectory() as folder:
        full = [sys.executable, "-m", "dovetail", "train", "ppo", *command]
        full += ["--total-steps", "2_000_000_000", "--no-anneal-lr", "--no-video"]
        full += ["--run", str(Path(folder) / "run"), "--quiet"]
        process = subprocess.Popen(full, stdout=subprocess.DEVNULL)
        samples: list[float] = []
        began = time.monotonic()
        try:
            while time.monotonic() - began < seconds:
                time.sleep(1.0)
                if process.poll() is not None:
                    raise SystemExit(f"{' '.join(full)} ended early.")
                samples.append(resident_megabytes(process.pid))
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    minutes = 1.5 if options.quick else options.minutes
    results = {}
    for name, command in COMMANDS.items():
        samples = sample(command, 60 * minutes)
        settled = statistics.median(samples[SETTLED : SETTLED + WINDOW])
        last = statistics.median(samples[-WINDOW:])
        growth = last / settled - 1
        results[name] = {"settled_mb": settled, "last_mb": last, "growth": growth}
        results[name]["samples_mb"] = samples[::10]
        met = "reached" if growth < TARGET else "MISSED"
        print(
            f"{name:6} {settled:7.0f} MB after a minute, {last:7.0f} MB after {minutes:g}: "
            f"{100 * growth:+.2f} %; target under {100 * TARGET:g} %: {met}",
            flush=True,
        )
    print(json.dumps({"minutes": minutes, "runs": results}))


if __name__ == "__main__":
    main()
