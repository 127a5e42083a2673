"""A run of a user's own algorithm and environment evaluates and resumes wherever it is moved."""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from small import QUIET

import dovetail as dt
from dovetail.cli.main import main
from dovetail.loading import load_object

MINE = '''
from dataclasses import dataclass
import gymnasium
import numpy as np
from dovetail.algorithms import A2C


@dataclass(frozen=True)
class Mine(A2C):
    """A2C under another name."""

    unroll_length: int = 4
    """Steps between two updates."""
    hidden_sizes: tuple[int, ...] = (4,)
    """Sizes of the hidden layers."""


class Slide(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-3, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.time = self.np_random.uniform(-1, 1), 0
        return np.float32([self.place]), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.place, self.time = np.clip(self.place + float(action[0]), -9, 9), self.time + 1
        return np.float32([self.place]), -abs(self.place), False, self.time == 5, {}
'''


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of the user's own and a run in runs/one, made from inside it."""
    home = tmp_path_factory.mktemp("moved") / "project"
    home.mkdir()
    (home / "mine.py").write_text(MINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        algorithm = load_object("mine.py:Mine", "algorithm")()
        settings = dataclasses.replace(QUIET, folder="runs/one", episodes=3)
        dt.train(algorithm, "mine.py:Slide", total_steps=128, settings=settings)
    return home


@pytest.fixture
def copied(project: Path, tmp_path: Path) -> Iterator[Path]:
    """The project elsewhere, while the first is gone."""
    hidden = project.with_name("hidden")
    os.rename(project, hidden)
    shutil.copytree(hidden, tmp_path / "elsewhere")
    yield tmp_path / "elsewhere"
    os.rename(hidden, project)


def evaluated(run: Path, *more: str, capsys: pytest.CaptureFixture[str]) -> float:
    assert main(["eval", str(run), "--episodes", "3", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)["mean_return"]


def test_a_project_that_moves_as_a_whole_goes_on(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied / "runs" / "one"
    best = dt.Run.open(run).summary["best_return"]
    assert evaluated(run, capsys=capsys) == pytest.approx(best)
    assert main(["train", "--resume", str(run), "--total-steps", "256", "--quiet"]) == 0
    resumed = dt.Run.open(run)
    assert resumed.summary["env_steps"] == 256
    assert resumed.config["algorithm"] == f"{copied / 'mine.py'}:Mine"
    assert resumed.config["env"] == f"{copied / 'mine.py'}:Slide"


def test_a_run_that_lost_its_files_says_how_to_give_them(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.move(copied / "runs" / "one", copied.parent / "alone"))
    mine = Path(shutil.move(copied / "mine.py", copied.parent / "new.py"))
    assert main(["eval", str(run)]) == 2
    told = capsys.readouterr().err
    assert "The run's algorithm names Mine in" in told
    assert "that is not there: give its new place with --algorithm mine.py:Mine." in told
    given = ["--algorithm", f"{mine}:Mine"]
    assert main(["eval", str(run), *given]) == 2
    assert "give its new place with --env mine.py:Slide." in capsys.readouterr().err
    given += ["--env", f"{mine}:Slide"]
    best = dt.Run.open(run).summary["best_return"]
    assert evaluated(run, *given, capsys=capsys) == pytest.approx(best)
    resume = ["train", "--resume", str(run), "--total-steps", "256", "--quiet", *given]
    assert main(resume) == 0
    capsys.readouterr()
    # From then on it knows them.
    assert np.isfinite(evaluated(run, capsys=capsys))


def test_a_policy_needs_no_file_of_the_users(copied: Path) -> None:
    (copied / "mine.py").unlink()
    policy = dt.load(copied / "runs" / "one")
    action, _ = policy.predict(np.array([0.5]))
    assert policy.action_space.contains(action)
    with pytest.raises(dt.UserError, match="the first word, dovetail train ppo"):
        from dovetail.cli import train

        train.run(["ppo", "--env", "CartPole-v1", "--algorithm", "mine.py:Mine"])
