"""A run under workers that is stopped and resumed ends where an uninterrupted one does."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from small import QUIET, a2c, numbers, saved

import dovetail
from dovetail.strategies import (
    ActorLearner,
    CentralInference,
    DataParallel,
    Environments,
    SplitDevices,
)
from dovetail.strategies.interface import Strategy

STRATEGIES: dict[str, Strategy] = {
    "actor-learner": ActorLearner(staleness=0),
    "central-inference": CentralInference(workers=2, processes=False),
    "split-devices": SplitDevices(staleness=0),
    "data-parallel": DataParallel(),
    "environments": Environments(processes=False),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_resuming_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    strategy, algorithm, env = (
        STRATEGIES[name],
        a2c(anneal_lr=False, num_envs=4),
        "dovetail:CartPole-v1",
    )
    whole, part = (dataclasses.replace(QUIET, folder=str(tmp_path / x)) for x in ("a", "b"))
    run = dovetail.train(algorithm, env, strategy, total_steps=160, settings=whole)
    dovetail.train(algorithm, env, strategy, total_steps=80, settings=part)
    resumed = dovetail.resume(tmp_path / "b", total_steps=160)
    (expected, meta), (found, again) = saved(run), saved(resumed)
    np.testing.assert_array_equal(numbers(found), numbers(expected))
    assert again["updates"] == meta["updates"] == 10


def test_an_asynchronous_run_goes_on_from_its_updates(tmp_path: Path) -> None:
    strategy = ActorLearner(staleness=2, processes=False)
    algorithm = dovetail.algorithms.IMPALA(unroll_length=4, num_envs=4, hidden_sizes=(8,))
    settings = dataclasses.replace(QUIET, folder=str(tmp_path / "run"))
    dovetail.train(algorithm, "CartPole-v1", strategy, total_steps=160, settings=settings)
    run = dovetail.resume(tmp_path / "run", total_steps=320)
    tree, meta = saved(run)
    assert meta["updates"] == 20 == int(tree["state"].updates)
    assert run.metrics["staleness_max"][-1] <= 2
    assert np.asarray(tree["actor"].step).min() >= 4
