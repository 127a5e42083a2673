"""How long it takes to compare many plans of one algorithm.

    python -m benchmarks.plans [--quick]

Fifty placements of DQN on CartPole, from every strategy that can place it: made with one `Graphs`,
which traces each division of the loop once, against new traces for every plan. Then every
algorithm's plan under every strategy, once it is traced: what `explain` takes.
"""

import argparse
import json
import time
from collections.abc import Iterator

from dovetail import algorithms, strategies
from dovetail.algorithms import ALGORITHMS, DQN
from dovetail.envs.resolve import resolve
from dovetail.errors import UserError
from dovetail.inspection.explain import Explanation
from dovetail.plan import make_plan
from dovetail.plan.ir import Resources
from dovetail.strategies import (
    STRATEGIES,
    ActorLearner,
    CentralInference,
    DataParallel,
    Environments,
    Local,
    SplitDevices,
)
from dovetail.strategies.interface import Strategy
from dovetail.training.planning import graphs_of

ENVS, STEPS = 32, 100_000
MACHINE = Resources(devices=8, cores=8)


def placements() -> Iterator[Strategy]:
    """Fifty of them."""
    yield Local()
    yield Local(sides=("replay",))
    for actors in (1, 2, 4, 8):
        for staleness in (0, 1, 2, 4):
            yield ActorLearner(actors=actors, staleness=staleness)
        for shards in (1, 2, 4):
            if actors % shards == 0:
                yield ActorLearner(actors=actors, shards=shards)
                yield ActorLearner(actors=actors, shards=shards, prefetch=2)
    for workers in (1, 2, 4, 8):
        yield CentralInference(workers=workers)
        yield Environments(workers=workers)
    for devices in (1, 2, 4):
        yield DataParallel(devices=devices)
        yield SplitDevices(learner_devices=1, threads=devices)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    env = resolve("gymnasium:CartPole-v1")
    chosen = list(placements())[: 10 if options.quick else 50]
    make_plan(Local(), graphs_of(DQN(num_envs=ENVS), env, STEPS), MACHINE)  # JAX is warm
    began, graphs = time.perf_counter(), graphs_of(DQN(num_envs=ENVS), env, STEPS)
    for strategy in chosen:
        make_plan(strategy, graphs, MACHINE)
    together = time.perf_counter() - began
    began = time.perf_counter()
    for strategy in chosen:
        make_plan(strategy, graphs_of(DQN(num_envs=ENVS), env, STEPS), MACHINE)
    apart = time.perf_counter() - began
    print(f"{len(chosen)} plans of DQN: {together:.2f} s, traced anew for each: {apart:.2f} s")
    slowest = max(explained())
    print(f"the slowest plan, once traced: {1e3 * slowest[0]:.0f} ms ({slowest[1]})")
    found = {"plans": len(chosen), "s": together, "anew_s": apart, "x": apart / together}
    print(json.dumps(found | {"slowest_ms": 1e3 * slowest[0], "slowest": slowest[1]}))


def explained() -> Iterator[tuple[float, str]]:
    """(seconds that a traced plan takes to be made and printed, algorithm and strategy)."""
    for name, target in ALGORITHMS.items():
        algorithm = getattr(algorithms, target.partition(":")[2])()
        for kind, place in STRATEGIES.items():
            strategy = getattr(strategies, place.partition(":")[2])()
            continuous = name in ("ddpg", "d4pg", "td3", "sac", "td3-bc", "cql")
            task = "Pendulum-v1" if continuous else "CartPole-v1"
            env = resolve(task, traced=strategy.traced_envs)
            graphs = graphs_of(algorithm, env, STEPS)
            try:
                make_plan(strategy, graphs, MACHINE)
            except UserError:
                continue
            began = time.perf_counter()
            plan, graph = make_plan(strategy, graphs, MACHINE)
            str(Explanation(graph, plan))
            yield time.perf_counter() - began, f"{name}, {kind}"


if __name__ == "__main__":
    main()
