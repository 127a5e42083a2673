"""Everything a user can get wrong: one sentence on standard error, exit code 2, nothing lost."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small import LENGTH, QUIET, a2c, numbers, saved

import dovetail
from dovetail.cli.main import main
from dovetail.run.folder import Run
from dovetail.strategies.fused import Fused

TINY = (
    f"--num-envs 4 --unroll-length {LENGTH} --hidden-sizes 8 --total-steps 64 --episodes 2"
    " --no-video"
)
OWN = '''
from dataclasses import dataclass

import jax.numpy as jnp

from dovetail.algorithms.a2c import A2C
from dovetail.envs.interface import Discrete


@dataclass(frozen=True)
class OnlyDiscrete(A2C):
    """Chooses among few."""

    actions = (Discrete,)


@dataclass(frozen=True)
class Mixes(A2C):
    """Reads the learner's weights on the actors' side."""

    def iteration(self, rl, state):
        params = self.acting(state)
        trajectory = rl.unroll(self.act, params, self.unroll_length, bootstrap=self.value)
        return self.learn(rl, state, rl.gather(trajectory))
'''

HOSTED = """
import jax
import numpy as np

from dovetail.envs.interface import Discrete, EnvSpec


class Hosted:
    '''A batch of environments that a user wrote as such.'''

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.spec = EnvSpec("test:Hosted", jax.ShapeDtypeStruct((1,), np.float32), Discrete(2))

    def reset(self, seeds):
        return np.zeros((self.num_envs, 1), np.float32)

    def step(self, action):
        raise NotImplementedError

    def close(self):
        pass
"""

Refused = Callable[[str], str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must be refused; gives its one sentence."""

    def run(line: str) -> str:
        capsys.readouterr()
        assert main([*line.split(), "--quiet"] if line.startswith("train") else line.split()) == 2
        out, err = capsys.readouterr()
        assert out == "" and "Traceback" not in err
        assert err.startswith("dovetail: ") and err.count("\n") == 1, err
        return err.removeprefix("dovetail: ").rstrip("\n")

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    settings = dataclasses.replace(QUIET, folder=str(folder))
    dovetail.train(a2c(num_envs=4), "dovetail:Chain-v0", Fused(), total_steps=64, settings=settings)
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be damaged."""
    return shutil.copytree(finished, tmp_path / "run")


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("train pp --env CartPole-v1", "There is no algorithm called 'pp': did you mean 'ppo'?"),
        ("train ppo --env CartPoll-v1", "'CartPoll-v1': did you mean 'CartPole-v1'?"),
        ("train ppo --env gymnsium:CartPole-v1", "did you mean 'gymnasium'?"),
        ("train ppo --env dovetail:Chian-v0", "did you mean 'Chain-v0'?"),
        ("train ppo --env CartPole-v1 --strategy fuse", "'fuse': did you mean 'fused'?"),
        ("train ppo --env CartPole-v1 --learning-rat 1", "did you mean --learning-rate?"),
        ("train ppo --env CartPole-v1 --learning-rate fast", "--learning-rate wants a number"),
        ("train ppo --env CartPole-v1 --display lively", "--display"),
        ("train ppo --env CartPole-v1 --seeds 0", "--seeds is 0: give 1 or more."),
        ("train ppo --env CartPole-v1 --seeds 2 --strategy local", "needs --strategy fused"),
        ("train ppo --env CartPole-v1 --total-steps 0", "--total-steps is 0: give 1 or more."),
        ("train ppo --env CartPole-v1 --num-envs 0", "--num-envs"),
        ("train ppo --env CartPole-v1 --seed -1", "--seed is -1: give 0 or more"),
        ("train ppo --env CartPole-v1 --seed 2147483648", "less than 2147483648"),
        ("train ppo --env CartPole-v1 --until 9 --evaluate-every 0", "--evaluate-every is 0"),
        ("train ppo --env CartPole-v1 --num-minibatches 3", "not a multiple of 3"),
        ("train ppo", "Name an environment"),
        ("train --env CartPole-v1", "Name an algorithm"),
        ("train absent.py:Mine --env CartPole-v1", "There is no file absent.py"),
        ("train own.py:OnlyDiscret --env CartPole-v1", "did you mean 'OnlyDiscrete'?"),
        (
            "train own.py:OnlyDiscrete --env Pendulum-v1",
            "OnlyDiscrete acts in Discrete action spaces, but gymnasium:Pendulum-v1 has Continuous",
        ),
        ("train own.py:Mixes --env CartPole-v1", "broadcast"),
        ("train ppo --env gymnasium:Acrobot-v1 --strategy fused", "use --strategy local"),
        ("train ppo --env dovetail:Chain-v0?lenght=3", "did you mean 'length'?"),
        ("train ppo --env CartPole-v1 --config absent.toml", "absent.toml"),
        ("train ppo --env CartPole-v1 --config bad.toml", "did you mean 'seed'?"),
        ("train --resume own.py", "own.py is a file, but a run is a folder"),
        ("train --resume nowhere", "There is no run at nowhere"),
        ("eval own.py", "own.py is a file, but a run is a folder"),
        ("watch own.py", "own.py is a file, but a run is a folder"),
        ("plot own.py", "own.py is a file, but a run is a folder"),
        ("eval .", "is not a run"),
        ("trian ppo", "did you mean 'train'?"),
    ],
)
def test_a_mistake(refused: Refused, line: str, sentence: str) -> None:
    Path("own.py").write_text(OWN)
    Path("bad.toml").write_text("sed = 1\n")
    assert sentence in refused(line)
    assert not Path("runs").exists()


STRATEGY_MISTAKES = [
    ("ppo --strategy actor-learner --actors 0", "--actors is 0: give 1 or more."),
    (
        "ppo --strategy actor-learner --num-envs 9",
        "9 environments cannot be split evenly among 2 actors",
    ),
    ("ppo --strategy actor-learner --actors two", "--actors wants a whole number, not 'two'."),
    ("ppo --strategy actor-learner --actor 2", "did you mean --actors?"),
    ("ppo --strategy actor-learner --processes maybe", "does not expect 'maybe'"),
    ("ppo --strategy actor-learner --staleness -1", "--staleness is -1: give 0 or more."),
    (
        "ppo --strategy actor-learner --staleness 3",
        "lets trajectories be 3 versions old, but PPO",
    ),
    ("ppo --strategy actor-learner --staleness 3", "lower --staleness to 1, or use an algorithm"),
    ("a2c --strategy actor-learner --staleness 1", "lower --staleness to 0, or use an algorithm"),
    ("reinforce --strategy split-devices --staleness 1", "lower --staleness to 0, or use"),
    (
        "ppo --strategy central-inference --workers 5",
        "8 environments cannot be split evenly among 5",
    ),
    (
        "ppo --strategy central-inference --num-envs 8 --workers 2 --batch 6",
        "A batch of 6 environments is not that of whole workers, of which each has 4: choose a "
        "multiple of 4 up to 8 (--batch).",
    ),
    (
        "ppo --strategy split-devices --num-envs 9",
        "9 environments cannot be split evenly among 2 act",
    ),
    (
        "ppo --strategy split-devices --threads 3 --learner-devices 2",
        "3 actor threads cannot be split evenly among 2 learner devices",
    ),
    (
        "ppo --strategy split-devices --actor-devices 4",
        "SplitDevices was asked for 5 devices, but this machine has 4: ask for fewer, or on a CPU",
    ),
    ("ppo --strategy data-parallel --devices 8", "asked for 8 devices, but this machine has 4"),
    ("ppo --strategy data-parallel --devices 3", "8 environments cannot be split evenly among 3"),
    ("ppo --strategy fused --devices 16", "asked for 16 devices, but this machine has 4"),
    ("ppo --strategy fused --devices 3", "8 environments cannot be split evenly among 3"),
    (
        "ppo --strategy parameter-server",
        "ParameterServer's workers send gradients (rl.reduce), but PPO sends whole trajectories",
    ),
    (
        "a3c --strategy parameter-server --workers 3",
        "8 environments cannot be split evenly among 3",
    ),
    ("a3c --strategy parameter-server --staleness 0", "--staleness is 0: give 1 or more."),
    ("ppo --strategy environments --workers 3", "8 environments cannot be split evenly among 3"),
    ("ppo --strategy environments --processes", "is a JAX environment, which no other process"),
    (
        "ppo --actors 2",
        "Fused, the strategy for dovetail:CartPole-v1, has no option --actors: name",
    ),
    ("ppo --strategy local --workers 2", "has no option --workers"),
    ("ppo --strategy absent.py:Mine", "There is no file absent.py to take the strategy from"),
    (
        "ppo --strategy own.py",
        "Say which class of own.py is the strategy, for instance own.py:Mixes.",
    ),
    ("ppo --strategy own.py:Mixed", "did you mean 'Mixes'?"),
    ("ppo --strategy own.py:Mixes", "is no strategy, it has no method plan"),
    (
        "ppo --strategy local --sides critic:0",
        "--sides 'critic:0' asks for no copy of critic: give 1 or more",
    ),
]


@pytest.mark.parametrize("command", ["train", "explain"])
@pytest.mark.parametrize(("words", "sentence"), STRATEGY_MISTAKES)
def test_a_mistake_about_a_strategy(
    refused: Refused, command: str, words: str, sentence: str
) -> None:
    Path("own.py").write_text(OWN)
    assert sentence in refused(f"{command} {words} --env dovetail:CartPole-v1")
    assert not Path("runs").exists()


def test_an_environment_that_no_process_can_step(refused: Refused) -> None:
    Path("hosted.py").write_text(HOSTED)
    line = "train a2c --env hosted.py:Hosted --strategy environments --num-envs 4"
    assert "cannot be stepped in a process of its own" in refused(f"{line} --processes")


def test_a_run_folder_that_exists(refused: Refused, copied: Path) -> None:
    before = contents(copied)
    line = f"train a2c --env CartPole-v1 {TINY} --run {copied}"
    assert "a run never overwrites anything" in refused(line)
    assert contents(copied) == before


@pytest.mark.parametrize("command", ["train --resume", "eval --checkpoint last"])
@pytest.mark.parametrize("damage", ["arrays", "meta.json"])
def test_a_truncated_checkpoint(refused: Refused, copied: Path, damage: str, command: str) -> None:
    (checkpoint,) = (copied / "checkpoints").iterdir()
    files = [path for path in checkpoint.rglob("*") if path.is_file() and damage in str(path)]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-10])
    before = contents(copied)
    assert "is damaged" in refused(f"{command} {copied}")
    assert contents(copied) == before


def test_a_checkpoint_of_another_algorithm(refused: Refused, copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    config["algorithm"] = "reinforce"
    del config["options"]["gae_lambda"]
    (copied / "config.json").write_text(json.dumps(config))
    sentence = refused(f"train --resume {copied}")
    assert "was saved with algorithm 'a2c', but 'reinforce' is asked for" in sentence


def test_a_checkpoint_of_other_shapes(refused: Refused, copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    config["options"]["hidden_sizes"] = [9]
    (copied / "config.json").write_text(json.dumps(config))
    assert "hidden_sizes was [8], is [9]" in refused(f"train --resume {copied} --total-steps 128")


def test_a_checkpoint_of_another_version(refused: Refused, copied: Path) -> None:
    (meta,) = copied.glob("checkpoints/*/meta.json")
    record = json.loads(meta.read_text())
    meta.write_text(json.dumps(record | {"format": 99}))
    assert "has format 99, but this Dovetail reads format" in refused(
        f"eval {copied} --checkpoint last"
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"options": {"hiden_sizes": [8]}}, "did you mean 'hidden_sizes'?"),
        ({"strategy": "fuzed"}, "fuzed"),
        ({"algorithm": "absent.py:Mine"}, "absent.py"),
        ({"settings": {"sparkle": 1}}, "config.json"),
        ({"steps": None}, "config.json"),
    ],
)
def test_a_config_that_was_changed(
    refused: Refused, copied: Path, change: dict[str, object], sentence: str
) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | change))
    assert sentence in refused(f"train --resume {copied}")


def test_a_run_without_a_checkpoint(refused: Refused, copied: Path) -> None:
    shutil.rmtree(copied / "checkpoints")
    assert "No checkpoint was found" in refused(f"train --resume {copied}")
    assert "No checkpoint was found" in refused(f"eval {copied} --checkpoint last")


def test_a_finished_run_wants_a_larger_total(refused: Refused, copied: Path) -> None:
    before = contents(copied)
    assert "give a larger one with --total-steps" in refused(f"train --resume {copied}")
    assert contents(copied) == before


def test_a_run_where_an_algorithm_is_named(refused: Refused, finished: Path) -> None:
    sentence = refused(f"explain {finished}")
    assert (
        f"{finished} is a run, not an algorithm: use dovetail explain {finished} --analyz"
        in sentence
    )


def test_one_learner_replica_is_one(refused: Refused) -> None:
    line = "train ppo --env dovetail:CartPole-v1 --strategy local --seeds 2"
    assert refused(line).endswith("with 1 learner replica.")


def test_a_metric_that_is_misspelled(refused: Refused, finished: Path) -> None:
    assert refused(f"plot {finished} --y entropi").endswith("did you mean 'entropy'?")


def test_an_error_stands_alone(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the Python that would do the same, for a new run and for a resumed one."""
    for words in (["ppo", "--env", "CartPoll-v1"], ["--resume", str(finished)]):
        assert main(["train", *words]) == 2
        err = capsys.readouterr().err
        assert err.startswith("dovetail: ") and err.count("\n") == 1, err


def test_a_folder_that_cannot_be_made(refused: Refused) -> None:
    Path("file").touch()
    told = refused(f"train a2c --env CartPole-v1 {TINY} --run file/run")
    assert "choose a folder that can be written" in told and "space" not in told
    assert "Cannot write" in refused(f"train a2c --env CartPole-v1 {TINY} --run file/run")
    assert "is a file" in refused(f"train a2c --env CartPole-v1 {TINY} --run file")
    os.rename("file", "runs")
    assert "Cannot write runs" in refused(f"train a2c --env CartPole-v1 {TINY}")


SMALL_DISK = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
sys.argv[0] = "dovetail"
runpy.run_module("dovetail", run_name="__main__")
"""
"""No file may be longer than 3000 bytes: for all we see, the disk is full."""


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """The real command, on a small disk."""
    return subprocess.run(
        [sys.executable, "-c", SMALL_DISK, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(dovetail.__file__).parents[1]),
            "JAX_COMPILATION_CACHE_DIR": "cache",  # the tests' own would be truncated, too
        },
    )


@pytest.mark.slow
def test_a_disk_that_fills_up(copied: Path) -> None:
    """A checkpoint does not fit any more: the earlier one stays, and can be resumed."""
    before = contents(copied / "checkpoints")
    done = command("train", "--resume", str(copied), "--total-steps", "640")
    assert done.returncode == 2 and done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("dovetail: ") and "Traceback" not in done.stderr, done.stderr
    assert "make room" in last or "free some space" in last
    assert contents(copied / "checkpoints") == before
    run = dovetail.resume(copied)
    assert run.summary["env_steps"] == 640
    assert numbers(saved(Run.open(copied))[0]["state"]).size > 0
