"""What the offline algorithms make of recorded data of mixed quality, from a fixed seed.

The Pendulum's is half of a controller that swings it up (-163 on average) and half random (-1237);
the pole's is mostly of one that lets it fall (12 episodes of 485 on average, 800 of 16). Whoever
only imitates is no better than the mixture; the others must find the better half.
"""

from pathlib import Path
from typing import Any

import pytest
from behavior import CARTPOLE, PENDULUM, Recorded, mixed

import dovetail as dt
from dovetail.algorithms import AWAC, BC, CQL, IQL, TD3BC, DiscreteCQL
from dovetail.strategies import Fused

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]

SMALL: dict[str, Any] = {
    "hidden_sizes": (64, 64),
    "batch_size": 128,
    "learning_rate": 1e-3,
    "gradient_steps": 500,
}
QUICK: dict[str, Any] = SMALL | {"gamma": 0.97, "tau": 0.02, "alpha": 40.0}
"""Of TD3+BC: the Pendulum's values differ little in their size, so they must weigh more."""


@pytest.fixture(scope="session")
def pendulum(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return mixed(tmp_path_factory.mktemp("pendulum"), PENDULUM, good=100, bad=100)


@pytest.fixture(scope="session")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return mixed(tmp_path_factory.mktemp("cartpole"), CARTPOLE, good=12, bad=800)


def learned(
    folder: Path, algorithm: Any, data: Recorded, steps: int, seed: int = 0, online_steps: int = 0
) -> dt.Run:
    settings = dt.Settings(
        folder=str(folder), evaluate_every=0, episodes=40, video=False, display="none"
    )
    told: dict[str, Any] = {"total_steps": steps, "online_steps": online_steps, "data": data.folder}
    strategy = Fused()
    return dt.train(algorithm, data.env, strategy, **told, seed=seed, settings=settings)


def final(run: dt.Run) -> float:
    return run.summary["final_return"]


@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [
        (TD3BC(**QUICK), 3000),
        (CQL(**SMALL, samples=3), 2000),
        (IQL(**SMALL, normalize_observations=True), 3000),
        (AWAC(**SMALL), 3000),
    ],
    ids=["td3-bc", "cql", "iql", "awac"],
)
def test_the_pendulum_is_swung_up(
    tmp_path: Path, pendulum: Recorded, algorithm: Any, steps: int
) -> None:
    """Measured: TD3+BC -164, CQL -276, IQL -336, AWAC -216."""
    assert -800 < pendulum.mean < -600
    assert final(learned(tmp_path / "run", algorithm, pendulum, steps)) > pendulum.mean + 150


@pytest.mark.parametrize(
    "algorithm",
    [DiscreteCQL(**SMALL), IQL(**SMALL), AWAC(**SMALL)],
    ids=["discrete-cql", "iql", "awac"],
)
def test_the_pole_is_balanced(tmp_path: Path, cartpole: Recorded, algorithm: Any) -> None:
    """Measured: each between 495 and 500."""
    assert cartpole.mean < 30
    assert final(learned(tmp_path / "run", algorithm, cartpole, 3000)) > 400


def test_imitation_is_no_better_than_who_is_imitated(
    tmp_path: Path, pendulum: Recorded, cartpole: Recorded
) -> None:
    """Measured: -942 where the mixture has -700, and as it acts 30 where that has 23."""
    swing = learned(tmp_path / "pendulum", BC(**SMALL), pendulum, 2000)
    assert final(swing) < pendulum.mean + 50
    balance = learned(tmp_path / "cartpole", BC(**SMALL), cartpole, 3000)
    assert dt.evaluate_run(balance, 40, explore=True).mean < 60


def test_acting_betters_what_was_learned_offline(tmp_path: Path, pendulum: Recorded) -> None:
    algorithm = TD3BC(**QUICK | {"gradient_steps": 0, "unroll_length": 25, "alpha": 100.0})
    offline = final(learned(tmp_path / "offline", algorithm, pendulum, 600))
    online = final(learned(tmp_path / "online", algorithm, pendulum, 600, online_steps=4000))
    assert online > offline + 100
    assert online > pendulum.mean + 150
