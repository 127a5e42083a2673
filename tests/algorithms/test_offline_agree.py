"""The offline algorithms under the strategies: each computes what the interpreter computes."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agreement import assert_close, without_order
from recorded_control import record_controls
from small import STEPS, Started, numbers

import dovetail
from dovetail.algorithm import Algorithm
from dovetail.algorithms import AWAC, BC, CQL, IQL, TD3BC, DiscreteCQL
from dovetail.strategies import ActorLearner, CentralInference, DataParallel, Fused, Local
from dovetail.strategies.interface import Strategy
from dovetail.training.dataset import RecordedData

ENVS, UPDATES, SEED = 4, 2, 3
CARTPOLE = "gymnasium:CartPole-v1?vectorization=sync&max_episode_steps=5"
PENDULUM = "gymnasium:Pendulum-v1?vectorization=sync&max_episode_steps=5"
TINY: dict[str, Any] = {
    "gradient_steps": 2,
    "batch_size": 8,
    "hidden_sizes": (8,),
    "buffer_size": 64,
    "learning_starts": 1,
    "unroll_length": 3,
    "num_envs": ENVS,
}
ALGORITHMS: dict[str, tuple[Algorithm, str]] = {
    "bc": (BC(**TINY), PENDULUM),
    "bc, discrete": (BC(**TINY), CARTPOLE),
    "td3-bc": (TD3BC(**TINY, normalize_observations=True), PENDULUM),
    "cql": (CQL(**TINY, samples=2), PENDULUM),
    # as many critics to choose from as a replica has items, and rows for each of these left out
    "cql, dropout": (CQL(**TINY, samples=2, num_critics=2, subset=1, dropout=0.3), PENDULUM),
    "discrete-cql": (DiscreteCQL(**TINY, n_step=2), CARTPOLE),
    "iql": (IQL(**TINY, normalize_observations=True), PENDULUM),
    "iql, discrete": (IQL(**TINY), CARTPOLE),
    "awac": (AWAC(**TINY), PENDULUM),
    "awac, discrete": (AWAC(**TINY, prioritized=True), CARTPOLE),
}
OFFLINE: dict[str, Strategy] = {
    "fused": Fused(),
    "local": Local(),
    "4 replicas": DataParallel(devices=4),
}
ONLINE: dict[str, Strategy] = {
    "local": Local(),
    "2 actors": ActorLearner(actors=2, staleness=0, processes=False),
    "inference": CentralInference(workers=2, processes=False),
}
ALONE = [
    *((name, "fused") for name in ALGORITHMS),
    *[("iql", "local"), ("td3-bc", "4 replicas"), ("cql", "4 replicas")],
    ("cql, dropout", "4 replicas"),
]
BESIDE = [("iql", "local"), ("awac, discrete", "2 actors"), ("discrete-cql", "inference")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    recorded = record_controls(tmp_path_factory.mktemp("data"))
    return dict(zip((CARTPOLE, PENDULUM), recorded, strict=True))


@cache
def interpreted(name: str, folder: Path, online: bool) -> Any:
    """Where the plain loop comes to."""
    algorithm, env = ALGORITHMS[name]
    told: dict[str, Any] = {
        "iterations": UPDATES,
        "total_steps": STEPS,
        "seed": SEED,
    }
    told |= {"data": folder, "online": online}
    return dovetail.interpret(algorithm, env, debug=False, **told).state


def compare(name: str, strategy: Strategy, folders: dict[str, Path], online: bool) -> None:
    algorithm, env = ALGORITHMS[name]
    data = RecordedData(folders[env])
    with Started(algorithm, env, strategy, seed=SEED, data=data, online=online) as running:
        before = numbers(running.state.params)
        running.advance(1)
        running.advance(UPDATES - 1)
    data.close()
    found, wanted = running.state, interpreted(name, folders[env], online)
    assert np.abs(numbers(wanted.params) - before).max() > 1e-4
    assert int(wanted.steps) == 2 * UPDATES
    if online:
        found, wanted = without_order(found), without_order(wanted)
    assert_close(found, wanted)


@pytest.mark.parametrize(("name", "strategy"), ALONE)
def test_from_recorded_data_alone(name: str, strategy: str, folders: dict[str, Path]) -> None:
    compare(name, OFFLINE[strategy], folders, online=False)


@pytest.mark.parametrize(("name", "strategy"), BESIDE)
def test_beside_what_is_acted(name: str, strategy: str, folders: dict[str, Path]) -> None:
    compare(name, ONLINE[strategy], folders, online=True)


def test_every_offline_algorithm_is_compared() -> None:
    known = {target.partition(":")[2] for target in dovetail.algorithms.ALGORITHMS.values()}
    made_for_data = {name for name in known if getattr(dovetail.algorithms, name).needs_data}
    assert {type(algorithm).__name__ for algorithm, _ in ALGORITHMS.values()} == made_for_data
