"""How full acting's batches are under CentralInference, and what its workers wait for.

    python -m benchmarks.central [--quick]

64 environments, as a user would train them: IMPALA on Gymnasium's CartPole, in threads and in
processes. By default a batch is those of three quarters of the workers, so 48 is the most there can
be; the others have those of half the workers, 32. A run's own metrics are read: `act_batch` is the
mean number of environments that one call of acting served, `share_wait_…` the share of the time
that a worker waited.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TARGET = 32.0
ENVS, UNROLL = 64, 32
ROOT = Path(__file__).resolve().parent.parent
RUNS = {
    "threads": ("processes=False",),
    "threads, batch 32": ("processes=False", "batch=32"),
    "processes": ("processes=True",),
    "processes, batch 32": ("processes=True", "batch=32"),
}


def run(settings: tuple[str, ...], steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.ours", "--algorithm", "impala"]
    command += ["--strategy", "central-inference", "--num-envs", str(ENVS), "--unroll", str(UNROLL)]
    command += ["--total-steps", str(steps), "--env", "gymnasium:CartPole-v1"]
    command += [part for setting in settings for part in ("--set", setting)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    steps = 100_000 if parser.parse_args().quick else 1_000_000
    results: dict[str, Any] = {}
    for name, settings in RUNS.items():
        answer = run(settings, steps)
        batch = answer["measured"]["act_batch"]
        waits = {k: v for k, v in answer["measured"].items() if k.startswith("share_wait_")}
        results[name] = {"act_batch": batch, "steps_per_s": answer["steps_per_s"], **waits}
        shown = ", ".join(f"{k.removeprefix('share_wait_')} {v:.0%}" for k, v in waits.items())
        print(
            f"{name:20} {batch:5.1f} of {ENVS} environments per call; target {TARGET:g}: "
            f"{'reached' if batch >= TARGET else 'MISSED'}; {answer['steps_per_s']:,.0f} steps/s; "
            f"waiting: {shown}",
            flush=True,
        )
    print(json.dumps({"target": TARGET, "runs": results}))


if __name__ == "__main__":
    main()
