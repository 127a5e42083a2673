"""An environment that fails in the middle of a run: named, and nothing before it is lost."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from small import LENGTH, QUIET, a2c, numbers, saved

import dovetail
from dovetail.cli.main import main
from dovetail.envs.interface import Discrete, EnvSpec, HostStep
from dovetail.errors import UserError
from dovetail.run.folder import Run
from dovetail.strategies.local import Local

BREAKS = '''
import gymnasium
import numpy as np
from pathlib import Path

MADE = []


class Breaks(gymnasium.Env):
    """Fails at its 30th step, in the environment made last, until `repaired` exists."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, how="raise"):
        self.how, self.steps = how, 0
        MADE.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action):
        self.steps += 1
        observation = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        reward = 1.0
        if self.steps == 30 and MADE[-1] is self and not Path("repaired").exists():
            if self.how == "raise":
                raise ZeroDivisionError("the pole fell through the floor")
            if self.how == "nan":
                observation[1] = np.nan
            if self.how == "reward":
                reward = np.inf
            if self.how == "shape":
                observation = observation[:2]
        return observation, reward, self.steps % 7 == 0, False, {}
'''
STEPS = 20 * LENGTH * 4


@pytest.fixture(autouse=True)
def breaks(tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text(BREAKS)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (
            "raise",
            "environment 3 raised ZeroDivisionError in step at step 30: the pole fell through",
        ),
        ("nan", r"environment 3 returned the observation .*nan.* not finite: .* \(step 30\)"),
        ("reward", r"environment 3 returned the reward inf, which is not finite: .* \(step 30\)"),
        ("shape", r"environment 3 returned an observation .*\[2\] .* \(step 30\)"),
    ],
)
def test_the_environment_and_the_step_are_named(how: str, sentence: str, tmp_path: Path) -> None:
    env = f"breaks.py:Breaks?how={how}"
    with pytest.raises(UserError, match=sentence) as error:
        dovetail.train(a2c(num_envs=4), env, Local(), total_steps=STEPS, settings=QUIET)
    run = Run.open(str(error.value).rpartition("--resume ")[2])
    tree, meta = saved(run)
    assert f"Update {meta['updates']} is saved" in str(error.value)
    assert meta["updates"] * LENGTH < 30
    assert np.isfinite(numbers(tree)).all()

    (tmp_path / "repaired").touch()
    resumed = dovetail.resume(run)
    assert resumed.summary["env_steps"] == STEPS
    assert int(saved(run)[0]["state"].updates) == 20
    steps = resumed.metrics["env_steps"]
    assert steps[-1] == STEPS and (np.diff(steps) > 0).all()


def test_by_command_it_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"train a2c --env breaks.py:Breaks --num-envs 4 --total-steps {STEPS}"
    line += f" --unroll-length {LENGTH}"
    line += " --hidden-sizes 8 --no-video --quiet --run broken"
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("dovetail: breaks.py:Breaks: environment 3 raised ZeroDivisionError")
    assert err.endswith("go on with dovetail train --resume broken\n")
    Path("repaired").touch()
    assert main(["train", "--resume", "broken"]) == 0
    assert Run.open("broken").summary["env_steps"] == STEPS


class Waits:
    """A user's own HostEnv, whose exceptions nobody else turns into sentences."""

    num_envs = 2

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.steps = num_envs, 0
        self.spec = EnvSpec("test:Waits", jax.ShapeDtypeStruct((1,), np.float32), Discrete(2))

    def reset(self, seeds: list[int]) -> Any:
        return np.zeros((self.num_envs, 1), np.float32)

    def step(self, action: np.ndarray) -> Any:
        self.steps += 1
        if self.steps == 30:
            raise RuntimeError("the robot is out of reach")
        observation, no = np.zeros((self.num_envs, 1), np.float32), np.zeros(self.num_envs, bool)
        return HostStep(observation, observation, np.zeros(self.num_envs), no, no, no, ~no)

    def close(self) -> None: ...


def test_any_exception_keeps_the_last_good_state() -> None:
    with pytest.raises(UserError, match="test:Waits raised RuntimeError at step 29: the robot"):
        dovetail.train(a2c(num_envs=2), Waits, Local(), total_steps=1000, settings=QUIET)
    (run,) = Path("runs").iterdir()
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert int(checkpoint.name) * LENGTH < 30
