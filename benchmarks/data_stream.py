"""Training on a dataset on the disk: how busy the learner is, and how much memory it takes.

    python benchmarks/data_stream.py [--total-steps 10_000_000] [--updates 20_000] [--memory 300]
                                     [--folder FOLDER] [--algorithm td3-bc]

Makes a dataset with the shapes of HalfCheetah and trains on it alone with `dovetail.train`: batches
of 256, two layers of 256, `--memory` megabytes of it in memory at a time. Prints one line of JSON.
Memory is resident memory above that of the same training on a dataset of a thousand steps; the
learner is busy but for the seconds that it waits for recorded steps.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from dovetail import data

LENGTH = 1000
OBSERVATION, ACTION = 17, 6


def make(folder: Path, steps: int) -> None:
    """Writes a dataset."""
    box = spaces.Box(-np.inf, np.inf, (OBSERVATION,), np.float32)
    action = spaces.Box(-1, 1, (ACTION,), np.float32)
    source = data.Source("gymnasium:HalfCheetah-v5", "benchmark")
    metadata = data.Metadata(box, action, sources=(source,))
    rng = np.random.default_rng(0)
    with data.Writer(folder, metadata) as writer:
        for _ in range(steps // LENGTH):
            writer.write(
                data.Episode(
                    observations=rng.standard_normal((LENGTH + 1, OBSERVATION), np.float32),
                    actions=2 * rng.random((LENGTH, ACTION), np.float32) - 1,
                    rewards=rng.standard_normal(LENGTH, np.float32),
                    terminations=np.zeros(LENGTH, bool),
                    truncations=np.arange(LENGTH) == LENGTH - 1,
                )
            )


def resident(field: str = "VmRSS") -> float:
    """Megabytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0]) / 1024


def trained(folder: Path, given: argparse.Namespace, updates: int) -> dict[str, Any]:
    """Trains, and says what was measured."""
    import dovetail
    from dovetail.algorithms import ALGORITHMS
    from dovetail.data import rounds
    from dovetail.loading import load_object

    feeds: list[rounds.Feed] = []
    made = rounds.Feed.__init__

    def noted(feed: rounds.Feed, *arguments: Any) -> None:
        made(feed, *arguments)
        feeds.append(feed)

    rounds.Feed.__init__ = noted  # type: ignore[method-assign]
    algorithm = load_object(ALGORITHMS[given.algorithm], "algorithm")(batch_size=256)
    with tempfile.TemporaryDirectory() as temporary:
        settings = dovetail.Settings(folder=f"{temporary}/run", display="none", video=False)
        began = time.perf_counter()
        run = dovetail.train(
            algorithm,
            strategy="fused",
            data=folder,
            data_memory=given.memory,
            total_steps=updates,
            settings=settings,
        )
        seconds = time.perf_counter() - began
        summary = run.summary
    learning = updates / summary["steps_per_s"] if summary["steps_per_s"] else seconds
    return {
        "rounds": feeds[0].number + 1,
        "updates_per_s": summary["steps_per_s"],
        "busy": 1 - feeds[0].waited / learning,
        "peak_mb": resident("VmHWM"),
        "wall_s": seconds,
    }


def apart(target: Any, *arguments: Any) -> Any:
    """What a process of its own answers; what it fails with is raised."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(target, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total-steps", type=int, default=10_000_000)
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--memory", type=int, default=300)
    parser.add_argument("--algorithm", default="td3-bc")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        small, folder = Path(temporary) / "small", given.folder or Path(temporary) / "data"
        apart(make, small, LENGTH)
        if not folder.exists():
            apart(make, folder, given.total_steps)
        before = apart(trained, small, given, 100)
        told = apart(trained, folder, given, given.updates)
    told |= {"steps": given.total_steps, "memory": given.memory, "algorithm": given.algorithm}
    told["peak_mb_above_model"] = told["peak_mb"] - before["peak_mb"]
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in told.items()}))


if __name__ == "__main__":
    main()
