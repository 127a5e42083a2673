"""Every algorithm learns what it should, from a fixed seed."""

from pathlib import Path
from typing import Any

import pytest

import dovetail as dt
from dovetail.evaluation.evaluate import evaluate
from dovetail.evaluation.trained import load_trained

pytestmark = pytest.mark.slow


def train(
    tmp_path: Path, algorithm: Any, env: str, strategy: Any, steps: int, **settings: Any
) -> dt.Run:
    folder = str(tmp_path / "run")
    quiet = dt.Settings(folder=folder, video=False, display="none", evaluate_every=5, **settings)
    return dt.train(algorithm, env, strategy, total_steps=steps, settings=quiet)


@pytest.mark.parametrize("name", ["PPO", "A2C", "REINFORCE"])
@pytest.mark.parametrize("strategy", ["local", "fused"])
def test_cartpole_is_solved(tmp_path: Path, name: str, strategy: str) -> None:
    algorithm = getattr(dt.algorithms, name)()
    chosen = getattr(dt.strategies, strategy.title())()
    run = train(tmp_path, algorithm, "CartPole-v1", chosen, 600_000, until=475)
    assert run.summary["final_return"] >= 475
    trained = load_trained(run)
    again = evaluate(trained.algorithm, trained.params[0], trained.env, episodes=50, seed=7)
    assert again.mean >= 450  # other episodes than those that ended the run


def test_acrobot_is_solved(tmp_path: Path) -> None:
    ppo = dt.algorithms.PPO(
        num_envs=64,
        unroll_length=64,
        learning_rate=1e-3,
        normalize_observations=True,
        normalize_rewards=True,
    )
    run = train(tmp_path, ppo, "gymnax:Acrobot-v1", dt.strategies.Fused(), 1_000_000, until=-100)
    assert run.summary["final_return"] >= -100


def test_pendulum_swings_up(tmp_path: Path) -> None:
    ppo = dt.algorithms.PPO(
        num_envs=64,
        unroll_length=64,
        learning_rate=1e-3,
        gamma=0.95,
        epochs=8,
        ent_coef=0.0,
        normalize_observations=True,
        normalize_rewards=True,
    )
    run = train(tmp_path, ppo, "gymnax:Pendulum-v1", dt.strategies.Fused(), 2_000_000, until=-200)
    assert run.summary["final_return"] >= -200


def test_a_memory_recalls_the_cue(tmp_path: Path) -> None:
    env = "dovetail:MemoryCue-v0"
    options: dict[str, Any] = {
        "num_envs": 64,
        "unroll_length": 32,
        "learning_rate": 2e-3,
        "hidden_sizes": (32,),
    }
    with_memory = dt.algorithms.PPO(recurrent=32, **options)
    run = train(tmp_path / "with", with_memory, env, dt.strategies.Fused(), 600_000, until=0.95)
    assert run.summary["final_return"] >= 0.95
    without = train(tmp_path / "without", dt.algorithms.PPO(**options), env, "fused", 100_000)
    assert without.summary["final_return"] <= 0.75  # a coin's chance is 0.5


def test_lunar_lander_lands(tmp_path: Path) -> None:
    ppo = dt.algorithms.PPO(
        unroll_length=256,
        num_minibatches=8,
        learning_rate=1e-3,
        gamma=0.995,
        gae_lambda=0.97,
        normalize_rewards=True,
    )
    lander = "LunarLander-v3"
    run = train(tmp_path, ppo, lander, dt.strategies.Local(), 700_000, until=100, episodes=30)
    assert run.summary["final_return"] >= 100  # a random policy crashes at about -180


def test_half_cheetah_moves_forward(tmp_path: Path) -> None:
    ppo = dt.algorithms.PPO(
        unroll_length=128,
        learning_rate=3e-4,
        epochs=8,
        num_minibatches=8,
        ent_coef=0.0,
        anneal_lr=False,
        normalize_observations=True,
        normalize_rewards=True,
    )
    cheetah, local = "HalfCheetah-v5", dt.strategies.Local()
    run = train(tmp_path, ppo, cheetah, local, 200_000, until=200, episodes=5)
    assert run.summary["final_return"] >= 200  # a policy that does not move loses a little
