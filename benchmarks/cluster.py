"""What a Ray cluster on one machine costs: weights for many, the start, many small actors.

    python -m benchmarks.cluster [--quick]

Weights: 100 MB to 8 processes that read them, against one put and one get. Start: from a cluster
that is up to the first update, with programs compiled before. Many: 64 actors with a fiftieth of a
CPU each run, report and end; nothing is left of them.
"""

import argparse
import json
import statistics
import time
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from dovetail.algorithm import Task
from dovetail.algorithms import IMPALA
from dovetail.envs.resolve import resolve
from dovetail.hosts.deployment import Deployment, ProcessShare
from dovetail.run.settings import Settings
from dovetail.strategies import ActorLearner
from dovetail.training import cluster as clustering
from dovetail.training.planning import plan_for
from dovetail.training.start import enable_compile_cache, first_state

MEGABYTES, READERS, ACTORS = 100, 8, 64
WEIGHTS_TARGET, START_TARGET = 2.0, 10.0
ENV, STEPS = "CartPole-v1", 1_000_000


class Reader:
    """A process that takes weights as an actor does."""

    def read(self, values: dict[int, Any]) -> float:
        return float(sum(array[0] for array in values.values()))


def weights(repeats: int) -> dict[str, float]:
    """Seconds until 8 processes have 100 MB, over those of one put and one get."""
    deployment = Deployment("local")
    connection = clustering.connect(deployment)
    import ray

    from dovetail.runtime.wire import pack_values

    leaves = {n: np.ones(MEGABYTES * 25_000, np.float32) for n in range(10)}
    readers = [ray.remote(Reader).options(num_cpus=0.01).remote() for _ in range(READERS)]
    ray.get([reader.read.remote({}) for reader in readers])
    many: list[float] = []
    one: list[float] = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        shared = ray.put(pack_values(leaves))  # as a RayHost shares them
        ray.get([reader.read.remote(shared) for reader in readers])
        many.append(time.perf_counter() - began)
        del shared
        began = time.perf_counter()
        reference = ray.put(leaves)
        ray.get(reference)
        one.append(time.perf_counter() - began)
        del reference
    connection.close()
    ratio = statistics.median(a / b for a, b in zip(many[1:], one[1:], strict=True))
    return {"many_s": statistics.median(many[1:]), "one_s": statistics.median(one[1:]), "x": ratio}


@contextmanager
def started(actors: int, envs: int, deployment: Deployment, seconds: dict[str, float]) -> Any:
    """A run on a local cluster; `seconds` notes from when the cluster was up."""
    algorithm = IMPALA(unroll_length=64, num_envs=envs)
    strategy = ActorLearner(actors=actors)
    found = resolve(ENV, traced=False)
    _, resources = clustering.join(deployment)
    planned = plan_for(algorithm, found, strategy, STEPS, resources)
    connection = clustering.connect(deployment, planned.plan)
    began = time.perf_counter()
    recipe = clustering.Recipe(algorithm, ENV, strategy, STEPS, enable_compile_cache)
    settings = Settings(patience=120.0)
    runtime = clustering.cluster_runtime(
        recipe, planned, deployment, connection, settings, lambda line: print(line, flush=True)
    )
    try:
        bound = algorithm.bind(Task(found.spec, planned.plan.update_envs, STEPS))
        runtime.load(*first_state(bound, None, envs, 0))
        runtime.advance(1).wait()
        seconds["first_update_s"] = time.perf_counter() - began
        yield runtime
    finally:
        ending = time.perf_counter()
        runtime.close()
        seconds["close_s"] = time.perf_counter() - ending


def start(repeats: int) -> dict[str, float]:
    """Seconds to the first update of 2 actors."""
    found: list[float] = []
    for _ in range(repeats + 1):  # the first may compile
        seconds: dict[str, float] = {}
        with started(2, 64, Deployment("local"), seconds):
            pass
        found.append(seconds["first_update_s"])
    return {"first_update_s": statistics.median(found[1:])}


def many() -> dict[str, float]:
    """64 actors: how long they take to come up, what they do, and how long to end."""
    seconds: dict[str, float] = {}
    deployment = Deployment("local", actor=ProcessShare(cpus=0.02))
    with started(ACTORS, ACTORS, deployment, seconds) as runtime:
        began = time.perf_counter()
        report = runtime.advance(5).wait()
        seconds["updates_s"] = time.perf_counter() - began
        seconds["restarts"] = report.measures["restarts"]
    return seconds


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    enable_compile_cache()
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    repeats = 2 if parser.parse_args().quick else 5
    results: dict[str, Any] = {"weights": weights(repeats)}
    x = results["weights"]["x"]
    print(
        f"weights: {MEGABYTES} MB to {READERS} processes took "
        f"{1e3 * results['weights']['many_s']:.0f} ms, {x:.2f} × one put and get; target "
        f"{WEIGHTS_TARGET:g}: {'reached' if x < WEIGHTS_TARGET else 'MISSED'}",
        flush=True,
    )
    results["start"] = start(repeats)
    first = results["start"]["first_update_s"]
    print(
        f"start: first update {first:.1f} s after the cluster was up; target {START_TARGET:g}: "
        f"{'reached' if first <= START_TARGET else 'MISSED'}",
        flush=True,
    )
    results["many"] = many()
    print(
        f"many: {ACTORS} actors were up and had made an update after "
        f"{results['many']['first_update_s']:.0f} s, five more took "
        f"{results['many']['updates_s']:.1f} s, and they ended in "
        f"{results['many']['close_s']:.1f} s; {results['many']['restarts']:.0f} restarts",
        flush=True,
    )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
