"""The algorithms of asynchronous actors learn, here without delay, from a fixed seed."""

from pathlib import Path
from typing import Any

import pytest

import dovetail as dt

pytestmark = pytest.mark.slow


def final_return(tmp_path: Path, algorithm: Any, env: str, strategy: Any, steps: int) -> float:
    """The greedy return of a short training that may end early, once it has solved the task."""
    until = {"dovetail:CartPole-v1": 475, "dovetail:MemoryCue-v0": 0.95}[env]
    settings = dt.Settings(
        folder=str(tmp_path / "run"), video=False, display="none", evaluate_every=5, until=until
    )
    run = dt.train(algorithm, env, strategy, total_steps=steps, settings=settings)
    return run.summary["final_return"]


@pytest.mark.parametrize("name", ["IMPALA", "APPO", "A3C"])
def test_cartpole_is_solved(tmp_path: Path, name: str) -> None:
    algorithm = getattr(dt.algorithms, name)()
    strategy = dt.strategies.Fused()
    assert final_return(tmp_path, algorithm, "dovetail:CartPole-v1", strategy, 1_500_000) >= 475


@pytest.mark.parametrize("name", ["IMPALA", "APPO", "A3C"])
def test_a_memory_recalls_the_cue(tmp_path: Path, name: str) -> None:
    options = {
        "num_envs": 64,
        "unroll_length": 32,
        "learning_rate": 2e-3,
        "hidden_sizes": (32,),
        "recurrent": 32,
    }
    algorithm = getattr(dt.algorithms, name)(**options)
    strategy = dt.strategies.Fused()
    assert final_return(tmp_path, algorithm, "dovetail:MemoryCue-v0", strategy, 1_500_000) >= 0.95
