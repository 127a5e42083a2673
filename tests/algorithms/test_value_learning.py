"""The value-based algorithms learn what they should, from a fixed seed."""

from pathlib import Path
from typing import Any

import pytest

import dovetail as dt
from dovetail.algorithms import DQN, QRDQN, R2D2, ApeX
from dovetail.evaluation.evaluate import evaluate
from dovetail.evaluation.trained import load_trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]

RAINBOW = DQN(
    n_step=3,
    dueling=True,
    prioritized=True,
    distributional=True,
    noisy=True,
    tau=0.05,
)


def train(folder: Path, algorithm: Any, env: str, steps: int, **settings: Any) -> dt.Run:
    quiet = dt.Settings(folder=str(folder), video=False, display="none", **settings)
    return dt.train(algorithm, env, dt.strategies.Fused(), total_steps=steps, settings=quiet)


@pytest.mark.parametrize(
    "algorithm",
    [DQN(), DQN(n_step=3, distributional=True), RAINBOW, QRDQN(), ApeX()],
    ids=["dqn", "c51", "rainbow", "qr-dqn", "apex"],
)
def test_cartpole_is_solved(tmp_path: Path, algorithm: Any) -> None:
    env = "dovetail:CartPole-v1"
    run = train(tmp_path / "run", algorithm, env, 150_000, evaluate_every=1, until=475)
    assert run.summary["final_return"] >= 475
    trained = load_trained(run)
    again = evaluate(trained.algorithm, trained.params[0], trained.env, episodes=50, seed=7)
    # Other episodes than those that ended the run: the best of several looks flatters a little.
    assert again.mean >= 400


def test_a_memory_recalls_the_cue(tmp_path: Path) -> None:
    env = "dovetail:MemoryCue-v0"
    run = train(tmp_path / "with", R2D2(), env, 15_000, evaluate_every=0)
    assert run.summary["final_return"] >= 0.95
    without = train(tmp_path / "without", DQN(), env, 15_000, evaluate_every=0)
    assert without.summary["final_return"] <= 0.75  # a coin's chance is 0.5
