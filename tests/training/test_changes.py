"""A run goes on with other options, and another begins with its parameters."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from small import QUIET, a2c, numbers, ppo, saved

import dovetail as dt
from dovetail.cli.main import main
from dovetail.errors import UserError
from dovetail.run.folder import Run
from dovetail.strategies.fused import Fused

ENV = "dovetail:CartPole-v1"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, not to be changed."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    settings = dataclasses.replace(QUIET, folder=str(folder))
    dt.train(a2c(num_envs=4, anneal_lr=False), ENV, Fused(), total_steps=32, settings=settings)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


@pytest.mark.slow
def test_another_learning_rate_is_used_and_recorded(run: Path) -> None:
    resumed = dt.resume(run, total_steps=64, learning_rate=1e-9, episodes=1)
    assert resumed.config["options"]["learning_rate"] == 1e-9
    assert resumed.config["settings"]["episodes"] == 1
    assert resumed.config["changes"] == [
        {
            "updates": 2,
            "env_steps": 32,
            "options": {
                "learning_rate": {"before": 0.001, "after": 1e-9},
                "episodes": {"before": 2, "after": 1},
            },
        }
    ]
    phases = resumed.metrics["phase"]
    assert np.nanmax(phases) == 1 and np.isnan(phases[0])
    before, after = (saved(Run.open(run), step)[0]["state"].params for step in (2, 4))
    np.testing.assert_allclose(numbers(before), numbers(after), atol=1e-7)  # nothing was learned


@pytest.mark.slow
def test_from_the_command_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"train --resume {run} --total-steps 64 --learning-rate 1e-4 --until 600"
    assert main([*line.split(), "--evaluate-every", "5", "--display", "plain"]) == 0
    told = capsys.readouterr().err
    assert "total_steps=64, until=600.0, evaluate_every=5.0" in " ".join(told.split())
    assert "learning_rate is 0.0001, no longer 0.001" in told
    config = Run.open(run).config
    assert config["options"]["learning_rate"] == 1e-4
    assert config["threshold"] == config["settings"]["until"] == 600.0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"hidden_sizes": (9,)},
            r"--hidden-sizes cannot change .*: its state was made for \(8,\);",
        ),
        ({"recurrent": 4}, "--recurrent cannot change when a run is resumed"),
        ({"anneal_lr": True}, "--anneal-lr cannot change when a run is resumed"),
        ({"activation": "relu"}, "--activation cannot change .*: the weights were trained with it"),
        ({"seed": 1}, "--seed cannot change .*: it has already decided everything random"),
        ({"strategy": "local"}, "--strategy cannot change"),
        ({"network": "mlp"}, "--network cannot change .*: the weights were trained with it"),
        ({"learning_rat": 1}, "A2C has no option 'learning_rat': did you mean 'learning_rate'?"),
        ({"learning_rate": -1.0}, "--learning-rate is -1.0: give more than 0."),
    ],
)
def test_what_cannot_change(trained: Path, options: dict[str, Any], sentence: str) -> None:
    before = (trained / "config.json").read_bytes()
    with pytest.raises(UserError, match=sentence):
        dt.resume(trained, total_steps=64, **options)
    assert (trained / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--seed 2", "'seed' has no place beside it"),
        ("--actors 8", "'actors' has no place beside it"),
        ("--num-envs 8", "--num-envs cannot change when a run is resumed: each of its environ"),
        ("--init-from x", "'init-from' has no place beside it"),
        ("--learning-rat 1", "did you mean --learning-rate?"),
    ],
)
def test_what_has_no_place_beside_resume(
    trained: Path, words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", str(trained), *words.split()]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_a_warm_start_begins_with_the_parameters(trained: Path) -> None:
    old = saved(Run.open(trained))[0]["state"]
    settings = dataclasses.replace(QUIET, folder="warm")
    algorithm = a2c(num_envs=4, learning_rate=1e-12, anneal_lr=False)
    run = dt.train(
        algorithm, ENV, Fused(), total_steps=16, seed=5, init_from=trained, settings=settings
    )
    new = saved(run)[0]["state"]
    np.testing.assert_allclose(numbers(new.params), numbers(old.params), atol=1e-7)
    assert int(new.updates) == 1 and run.config["init_from"] == str(trained)
    assert not np.array_equal(jax.random.key_data(new.key), jax.random.key_data(old.key))


@pytest.mark.slow
def test_a_warm_start_of_every_seed(trained: Path) -> None:
    settings = dataclasses.replace(QUIET, folder="warm", seeds=2)
    algorithm = a2c(num_envs=4, learning_rate=1e-12, anneal_lr=False)
    run = dt.train(algorithm, ENV, Fused(), total_steps=16, init_from=trained, settings=settings)
    old, new = (saved(Run.open(path))[0]["state"].params for path in (trained, run.path))
    first, second = (jax.tree.map(lambda x, i=i: x[i], new) for i in range(2))
    np.testing.assert_allclose(numbers(first), numbers(old), atol=1e-7)
    np.testing.assert_allclose(numbers(second), numbers(old), atol=1e-7)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "a2c --env dovetail:Chain-v0 --hidden-sizes 8",
            "do not fit A2C on dovetail:Chain-v0: state",
        ),
        (
            f"a2c --env {ENV} --hidden-sizes 9",
            "--init-from needs the same observations, actions and",
        ),
        (f"dqn --env {ENV} --hidden-sizes 8", "and is not there in that run"),
    ],
)
def test_a_warm_start_from_what_does_not_fit(
    trained: Path, words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"train {words} --num-envs 4 --init-from {trained}"
    assert main(line.split()) == 2
    told = capsys.readouterr().err
    assert sentence in told and told.count("\n") == 1  # and no Python before it
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_warm_start_of_another_algorithm_with_the_same_networks(trained: Path) -> None:
    settings = dataclasses.replace(QUIET, folder="warm")
    algorithm = ppo(num_envs=4, learning_rate=1e-12, anneal_lr=False)
    run = dt.train(algorithm, ENV, Fused(), total_steps=16, init_from=trained, settings=settings)
    old, new = (saved(Run.open(path))[0]["state"].params for path in (trained, run.path))
    np.testing.assert_allclose(numbers(new), numbers(old), atol=1e-7)
