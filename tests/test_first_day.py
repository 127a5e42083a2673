"""A user of Stable-Baselines3, from end to end: each step goes on with what the one before left."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import dovetail as dt
from dovetail.algorithms import PPO
from dovetail.evaluation.evaluate import _own_seeds

ENV, EPISODES = "Pendulum-v1", 4
LIMIT = 40
"""Steps of an episode."""
ENOUGH = 20_000
"""Steps at which the callback stops the run."""
SEEN: list[dt.TrainingEvent] = []
"""What the callback was given."""


def stop_at_enough(event: dt.TrainingEvent) -> bool:
    SEEN.append(event)
    return event.step < ENOUGH


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dt.Run:
    """Trains with a wrapper and a callback, and with evaluations in the background."""
    settings = dt.Settings(
        folder=str(tmp_path_factory.mktemp("first") / "run"),
        episodes=EPISODES,
        evaluate_every=0.2,
        video=False,
        display="none",
    )
    return dt.train(
        PPO(unroll_length=32, hidden_sizes=(16,), normalize_observations=True),
        ENV,
        wrap=[f"time-limit:{LIMIT}"],
        total_steps=30_000,
        callback=stop_at_enough,
        settings=settings,
    )


def played(policy: dt.Policy, env: gymnasium.Env, seed: int) -> float:
    """The return of an episode in a plain Gymnasium loop."""
    observation, _ = env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        action, _ = policy.predict(observation)
        observation, reward, terminated, truncated, _ = env.step(action)
        total, over = total + float(reward), terminated or truncated
    return total


@pytest.mark.slow
def test_the_callback_saw_the_run_and_stopped_it(run: dt.Run) -> None:
    assert ENOUGH <= run.summary["env_steps"] < 30_000
    assert {event.name for event in SEEN} == {"report", "evaluation", "checkpoint", "end"}
    assert SEEN[-1].name == "end" and SEEN[-1].run.path == run.path


@pytest.mark.slow
def test_the_best_policy_is_kept(run: dt.Run) -> None:
    summary = run.summary
    assert summary["best_return"] >= summary["final_return"]
    assert dt.load(run).mean_return == summary["best_return"]


@pytest.mark.slow
def test_predict_in_a_gymnasium_loop_returns_what_eval_says(run: dt.Run) -> None:
    evaluation = dt.evaluate_run(run, episodes=EPISODES)
    assert evaluation.which == "best"
    assert evaluation.mean == pytest.approx(run.summary["best_return"])
    policy, env = dt.load(run), gymnasium.make(ENV, max_episode_steps=LIMIT)
    returns = [played(policy, env, seed) for seed in _own_seeds(0, EPISODES)]
    np.testing.assert_allclose(returns, evaluation.returns, rtol=1e-3)


@pytest.mark.slow
def test_it_goes_on_with_another_learning_rate(run: dt.Run, tmp_path: Path) -> None:
    copied = shutil.copytree(run.path, tmp_path / "run")
    steps = run.summary["env_steps"] + 512
    resumed = dt.resume(copied, total_steps=steps, learning_rate=1e-4)
    assert resumed.summary["env_steps"] >= steps
    assert resumed.config["changes"][-1]["options"]["learning_rate"]["after"] == 1e-4
    assert resumed.summary["best_return"] >= run.summary["best_return"]


@pytest.mark.slow
def test_a_moved_run_evaluates_the_same_elsewhere(run: dt.Run, tmp_path: Path) -> None:
    moved = shutil.copytree(run.path, tmp_path / "other" / "place")
    command = [sys.executable, "-m", "dovetail", "eval", "place", "--episodes", str(EPISODES)]
    root = Path(dt.__file__).parent.parent
    done = subprocess.run(
        [*command, "--json"],
        cwd=moved.parent,
        env={"PYTHONPATH": str(root), "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["policy"] == "best" and told["env_steps"] == run.summary["best_step"]
    assert told["mean_return"] == pytest.approx(run.summary["best_return"], rel=1e-3)
