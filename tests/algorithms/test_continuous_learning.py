"""The algorithms for continuous control learn what they should, from a fixed seed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dovetail as dt
from dovetail.data import Reader

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]


def train(
    tmp_path: Path, algorithm: Any, env: str, strategy: Any, steps: int, **more: Any
) -> float:
    more.setdefault("evaluate_every", 2)
    settings = dt.Settings(folder=str(tmp_path / "run"), video=False, display="none", **more)
    run = dt.train(algorithm, env, strategy, total_steps=steps, seed=0, settings=settings)
    return run.summary["final_return"]


@pytest.mark.parametrize("name", ["SAC", "TD3", "DDPG", "D4PG"])
def test_pendulum_swings_up(tmp_path: Path, name: str) -> None:
    """Measured on four seeds: after 7,000, 9,000 to 19,000, 12,000 and 4,000 steps."""
    light: dict[str, Any] = {
        "num_envs": 4,
        "hidden_sizes": (64, 64),
        "batch_size": 128,
        "learning_rate": 1e-3,
    }
    algorithm, strategy = getattr(dt.algorithms, name)(**light), dt.strategies.Fused()
    found = train(tmp_path, algorithm, "gymnax:Pendulum-v1", strategy, 40_000, until=-200)
    assert found >= -200


def test_cartpole_is_solved_among_discrete_actions(tmp_path: Path) -> None:
    algorithm = dt.algorithms.SACDiscrete(gradient_steps=4, hidden_sizes=(64, 64))
    strategy = dt.strategies.Fused()
    found = train(tmp_path, algorithm, "dovetail:CartPole-v1", strategy, 100_000, until=475)
    assert found >= 475


HOPPER = ("Hopper-v5", 150, 5, 0.008)
CHEETAH = ("HalfCheetah-v5", 200, 8, 0.05)


@pytest.mark.parametrize(
    ("name", "env", "wanted", "speed", "seconds"),
    [("SAC", *HOPPER), ("TD3", *CHEETAH), ("DDPG", *HOPPER)],
    ids=["SAC-Hopper", "TD3-HalfCheetah", "DDPG-Hopper"],
)
def test_a_body_moves_forward(
    tmp_path: Path, name: str, env: str, wanted: float, speed: int, seconds: float
) -> None:
    """At random the hopper falls where it stands, with 20, and the cheetah goes backwards to -250.
    What is paid could be earned by standing: the way is looked at, too. `speed` is the number of
    the forward speed in what is seen, `seconds` what a step takes."""
    light: dict[str, Any] = {
        "num_envs": 4,
        "gradient_steps": 4,
        "hidden_sizes": (64, 64),
        "batch_size": 128,
    }
    algorithm, strategy = getattr(dt.algorithms, name)(**light), dt.strategies.Local()
    assert train(tmp_path, algorithm, env, strategy, 60_000, until=wanted, episodes=5) >= wanted
    dt.evaluate_run(tmp_path / "run", 5, record=tmp_path / "lived")
    with Reader(tmp_path / "lived") as reader:
        ways = [seconds * episode.observations[:, speed].sum() for episode in reader]
    assert np.median(ways) > 0.3  # metres; at random -0.03 and -5
