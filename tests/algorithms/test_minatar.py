"""Images under Fused: the convolutional network learns inside the compiled loop."""

from pathlib import Path
from typing import Any

import pytest

import dovetail as dt

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]

RANDOM = 0.41
"""The mean return of a random policy in Breakout, over twenty thousand episodes."""


@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [
        (dt.algorithms.PPO(64, learning_rate=2.5e-3, epochs=2, activation="relu"), 100_000),
        (dt.algorithms.IMPALA(16, num_envs=64, learning_rate=2e-3, activation="relu"), 220_000),
    ],
    ids=["ppo", "impala"],
)
def test_breakout_is_played_better_than_at_random(
    tmp_path: Path, algorithm: Any, steps: int
) -> None:
    settings = dt.Settings(
        folder=str(tmp_path / "run"), video=False, display="none", evaluate_every=0
    )
    fused = dt.strategies.Fused()
    env = "gymnax:Breakout-MinAtar"
    run = dt.train(algorithm, env, fused, total_steps=steps, settings=settings)
    assert run.summary["final_return"] >= 3 * RANDOM


def test_dqn_learns_breakout_from_far_fewer_steps(tmp_path: Path) -> None:
    settings = dt.Settings(
        folder=str(tmp_path / "run"), video=False, display="none", evaluate_every=0
    )
    dqn = dt.algorithms.DQN(4, num_envs=32, gradient_steps=16, learning_rate=5e-4, n_step=3)
    env, fused = "gymnax:Breakout-MinAtar", dt.strategies.Fused()
    run = dt.train(dqn, env, fused, total_steps=30_000, settings=settings)
    assert run.summary["final_return"] >= 5 * RANDOM
