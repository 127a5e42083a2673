"""Wrappers and networks are part of a run: what evaluates, resumes or shows it applies them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from small import QUIET, ppo

import dovetail
from dovetail.algorithms.ppo import PPO
from dovetail.cli.main import main
from dovetail.run.folder import Run
from dovetail.strategies.actor_learner import ActorLearner
from dovetail.strategies.local import Local

OWN = """
import flax.linen as nn
import gymnasium


class Scaled(gymnasium.ObservationWrapper):
    def __init__(self, env, factor=2.0):
        super().__init__(env)
        self.factor = factor

    def observation(self, observation):
        return observation * self.factor


class Features(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.tanh(nn.Dense(6)(x))


class Scalars(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x)[:, 0]
"""
TINY = "--unroll-length 4 --num-minibatches 2 --hidden-sizes 8 --episodes 2 --no-video --quiet"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    return file


@pytest.fixture(scope="module")
def run(own: Path) -> Run:
    folder = own.parent / "run"
    words = f"train ppo --env CartPole-v1 --wrap time-limit:12,{own}:Scaled:3 {TINY}"
    words += f" --network {own}:Features --total-steps 64 --run {folder}"
    assert main(words.split()) == 0
    return Run.open(folder)


@pytest.mark.slow
def test_a_run_remembers_its_wrappers_and_network(run: Run, own: Path) -> None:
    assert f"wrap=time-limit:12,{own}:Scaled:3" in run.config["env_id"]
    assert run.config["options"]["network"].endswith("own.py:Features")
    found = dovetail.evaluate_run(run, episodes=3)
    assert max(found.lengths) <= 12


@pytest.mark.slow
def test_a_wrapped_run_goes_on(run: Run) -> None:
    assert main(f"train --resume {run.path} --total-steps 128 --quiet".split()) == 0
    assert run.summary["env_steps"] == 128
    assert max(dovetail.evaluate_run(run, episodes=3).lengths) <= 12


@pytest.mark.slow
def test_actors_in_processes_apply_them(own: Path, tmp_path: Path) -> None:
    settings = dataclasses.replace(QUIET, folder=str(tmp_path / "run"))
    trained = dovetail.train(
        ppo(num_envs=4, network=f"{own}:Features"),
        "CartPole-v1",
        ActorLearner(actors=2, processes=True),
        wrap=["time-limit:12", f"{own}:Scaled:3"],
        total_steps=64,
        settings=settings,
    )
    lengths = trained.metrics["episode_length"]
    assert np.nanmax(lengths) <= 12


class Halved(gymnasium.RewardWrapper[Any, Any]):
    """Pays half."""

    def reward(self, reward: Any) -> float:
        return float(reward) / 2


@pytest.mark.slow
def test_objects_in_memory_serve_this_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Local5(gymnasium.wrappers.TimeLimit):
        """Only this function has it."""

        def __init__(self, env: Any) -> None:
            super().__init__(env, 5)

    settings = dataclasses.replace(QUIET, folder=str(tmp_path / "run"))
    wrap = [Local5, lambda env: Halved(env)]
    trained = dovetail.train(
        ppo(num_envs=4), "CartPole-v1", Local(), wrap=wrap, total_steps=64, settings=settings
    )
    found = dovetail.evaluate_run(trained, episodes=2)
    np.testing.assert_array_equal(found.returns, [2.5, 2.5])
    config = json.loads((trained.path / "config.json").read_text())
    (trained.path / "config.json").write_text(
        json.dumps(config).replace("python:", "python:another_")
    )
    assert main(["eval", str(trained.path), "--trust"]) == 2
    assert "was a Python object of another process" in capsys.readouterr().err


@pytest.mark.slow
def test_compiled_environments_are_wrapped_too(tmp_path: Path) -> None:
    settings = dataclasses.replace(QUIET, folder=str(tmp_path / "run"))
    trained = dovetail.train(
        ppo(), "dovetail:CartPole-v1", wrap="time-limit:7", total_steps=256, settings=settings
    )
    assert trained.config["strategy"] == "fused"
    assert max(dovetail.evaluate_run(trained, episodes=4).lengths) == 7


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train dqn --env Pendulum-v1 --wrap flatten", "DQN acts in Discrete action spaces, but"),
        ("train ppo --env CartPole-v1 --wrap frame-stak:4", "did you mean 'frame-stack'"),
        ("train ppo --env CartPole-v1 --network cn", "no network 'cn': did you mean 'cnn'"),
        ("train ppo --env CartPole-v1 --network cnn", "cnn is for images"),
        ("train ppo --env CartPole-v1 --network OWN:Scalars", r"Scalars (OWN:21) returned shape"),
        ("train ppo --env CartPole-v1 --network gone.py:Net", "no file"),
        ("explain ppo --env CartPole-v1 --wrap gray", "The wrapper 'gray' does not fit"),
        ("train bc --data d --wrap gray", "--wrap is for the environment of --env"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    words: str, said: str, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.replace("OWN", str(own)).split()) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("dovetail: ") and said.replace("OWN", str(own)) in err


def test_help_names_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "sac", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "--wrap WRAPPERS" in out and "--network network" in out and "impala" in out
    assert PPO().network == "auto"
