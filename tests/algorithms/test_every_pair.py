"""Every algorithm runs under every strategy that can place it.

Those pairs that are not compared with the interpreter elsewhere do two small updates here.
"""

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agreement import CARTPOLE, PENDULUM
from recorded_control import record_controls
from small import Started, numbers
from test_explain import CONTINUOUS, REFUSED
from test_offline_agree import ALONE
from test_strategies_agree import COMPILED, ON_THE_HOST, pairs
from test_strategies_agree import STRATEGIES as COMPARED

from dovetail.algorithms import ALGORITHMS
from dovetail.loading import load_object
from dovetail.strategies import STRATEGIES
from dovetail.strategies.interface import Strategy
from dovetail.training.dataset import RecordedData

TINY: dict[str, Any] = {
    "unroll_length": 3,
    "gradient_steps": 1,
    "batch_size": 8,
    "buffer_size": 64,
    "learning_starts": 1,
    "hidden_sizes": (8,),
    "epochs": 1,
    "num_minibatches": 1,
    "recurrent": 4,
    "burn_in": 1,
    "learned": 2,
    "period": 2,
    "atoms": 3,
    "quantiles": 3,
    "samples": 1,
}
"""Whichever of these an algorithm has."""
SMALL: dict[str, dict[str, Any]] = {
    "actor-learner": {"actors": 2, "processes": False},
    "central-inference": {"workers": 2, "processes": False},
    "environments": {"workers": 2, "processes": False},
    "data-parallel": {"devices": 2},
    "parameter-server": {"workers": 2},
}
NAMES = {target.partition(":")[2]: name for name, target in STRATEGIES.items()}
DONE = {
    (name, NAMES[type(COMPARED[strategy]).__name__])
    for name, strategy in [*pairs(COMPILED), *pairs(ON_THE_HOST)]
}
"""Pairs that are compared elsewhere."""
REST = [
    (name, strategy)
    for name in ALGORITHMS
    for strategy in STRATEGIES
    if (name, strategy) not in DONE and (name, strategy) not in REFUSED
]
OFFLINE = [
    (name, strategy)
    for name in ALGORITHMS
    if load_object(ALGORITHMS[name], "algorithm").needs_data
    for strategy in ("fused", "local", "data-parallel")
    if (name, strategy.replace("data-parallel", "4 replicas")) not in ALONE
]


def algorithm_of(name: str) -> Any:
    kind = load_object(ALGORITHMS[name], "algorithm")
    known = {field.name for field in dataclasses.fields(kind)}
    chosen = {key: value for key, value in TINY.items() if key in known}
    if name != "r2d2":
        chosen.pop("recurrent", None)
    return kind(**chosen)


def strategy_of(name: str) -> Strategy:
    return load_object(STRATEGIES[name], "strategy")(**SMALL.get(name, {}))


def run(algorithm: Any, env: str, strategy: Strategy, **more: Any) -> None:
    with Started(algorithm, env, strategy, **more) as running:
        before = numbers(running.state.params)
        report = running.advance(2)
    after = numbers(running.state.params)
    assert report.iterations == 2 and report.finite
    assert np.isfinite(after).all() and np.abs(after - before).max() > 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    recorded = record_controls(tmp_path_factory.mktemp("data"))
    return dict(zip((CARTPOLE, PENDULUM), recorded, strict=True))


@pytest.mark.parametrize(("name", "strategy"), REST)
def test_it_runs(name: str, strategy: str, folders: dict[str, Path]) -> None:
    algorithm, env = algorithm_of(name), PENDULUM if name in CONTINUOUS else CARTPOLE
    if not algorithm.needs_data:
        run(algorithm, env, strategy_of(strategy))
        return
    with closing(RecordedData(folders[env])) as data:
        run(algorithm, env, strategy_of(strategy), data=data)


@pytest.mark.parametrize(("name", "strategy"), OFFLINE)
def test_it_runs_on_recorded_data_alone(name: str, strategy: str, folders: dict[str, Path]) -> None:
    env = PENDULUM if name in CONTINUOUS else CARTPOLE
    with closing(RecordedData(folders[env])) as data:
        run(algorithm_of(name), env, strategy_of(strategy), data=data, online=False)
