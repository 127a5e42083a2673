"""docs/metrics.md explains every column that runs write."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS
from small import QUIET, ppo

import dovetail
from dovetail.algorithms import ALGORITHMS, IMPALA
from dovetail.envs.interface import Discrete
from dovetail.loading import load_object
from dovetail.strategies import ActorLearner, CentralInference, Fused, Local

PAGE = DOCS["metrics.md"]
TOLD = set(re.findall(r"`([a-z_]+)`", PAGE))
RUNS: dict[str, tuple[Any, str, Any]] = {
    "fused": (ppo(num_envs=4), "dovetail:CartPole-v1", Fused()),
    "local": (ppo(num_envs=4), "CartPole-v1", Local()),
    "actor-learner": (
        IMPALA(4, num_envs=4, hidden_sizes=(8,)),
        "CartPole-v1",
        ActorLearner(processes=False),
    ),
    "central-inference": (
        IMPALA(4, num_envs=4, hidden_sizes=(8,)),
        "CartPole-v1",
        CentralInference(workers=2, processes=False),
    ),
}


@pytest.mark.parametrize("strategy", RUNS)
def test_every_column_is_explained(strategy: str, tmp_path: Path) -> None:
    settings = replace(QUIET, folder=str(tmp_path / "run"))
    run = dovetail.train(*RUNS[strategy], total_steps=640, settings=settings)
    columns = {name for name in run.metrics if not name.startswith("share_")}
    assert {"time_s", "loss", "steps_per_s"} <= columns
    assert columns <= TOLD
    assert "`share_<fragment>`" in PAGE and "`share_wait_<worker>`" in PAGE


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_metric_of_an_algorithm_is_explained(name: str) -> None:
    algorithm = load_object(ALGORITHMS[name], "algorithm")()
    env = "CartPole-v1" if Discrete in algorithm.actions else "Pendulum-v1"
    metrics = {metric for metric, _ in dovetail.trace(algorithm, env).metrics}
    [table] = re.findall(r"### The metrics of the algorithms\n(.*?)\n###", PAGE, re.DOTALL)
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    told = {
        metric
        for _, metrics_told, _, whose, _ in rows
        for metric in re.findall(r"`(\w+)`", metrics_told)
        if _has(whose.strip(), type(algorithm).__name__)
    }
    assert told == metrics


def _has(whose: str, algorithm: str) -> bool:
    """Whether a cell like `all but A3C` or `PPO, APPO` is said of an algorithm."""
    if whose.startswith("all"):
        return algorithm not in whose.removeprefix("all but ").split(", ")
    return algorithm in whose.split(", ")
