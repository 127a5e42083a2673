"""`dovetail train` and `dovetail explain` up to the public functions that they call."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import dovetail
from dovetail.algorithms.ppo import PPO
from dovetail.cli.experiment import TRACED
from dovetail.cli.main import main
from dovetail.envs.registry import BACK_ENDS
from dovetail.run.settings import Settings
from dovetail.strategies.actor_learner import ActorLearner
from dovetail.strategies.fused import Fused
from dovetail.strategies.local import Local
from dovetail.training import planning

SUMMARY = {"algorithm": "ppo", "final_return": 480.0, "run": "runs/x"}


def command(text: str) -> int:
    return main(text.split())


class Trained:
    summary = SUMMARY

    def __str__(self) -> str:
        return "run runs/x"


class Calls(list[tuple[tuple[Any, ...], dict[str, Any]]]):
    """What a public function was called with, instead of doing it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.append((args, kwargs))
        return Trained()


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr(dovetail, "train", calls, raising=False)
    monkeypatch.setattr(dovetail, "Settings", Settings, raising=False)
    monkeypatch.setattr(planning, "default_strategy", lambda env: Local())
    return calls


def test_the_shortest_line(train: Calls) -> None:
    assert command("train ppo --env CartPole-v1") == 0
    assert train == [((PPO(), "CartPole-v1", None), {"settings": Settings()})]


def test_options_reach_algorithm_strategy_and_settings(train: Calls) -> None:
    line = "train PPO --env X --strategy fused --num-envs 32 --devices 2 --seed 3 --total-steps 2e5"
    line += " --learning_rate 1e-3 --hidden-sizes 32,32 --no-anneal-lr --gae-lambda 0.9"
    line += " --until -1e2 --run r"
    assert main(line.split()) == 0
    algorithm = PPO(
        num_envs=32, learning_rate=1e-3, hidden_sizes=(32, 32), anneal_lr=False, gae_lambda=0.9
    )
    settings = Settings(until=-100.0, folder="r")
    (call,) = train
    assert call[0] == (algorithm, "X", Fused(devices=2))
    assert call[1] == {"seed": 3, "total_steps": 200_000, "settings": settings}


@pytest.mark.parametrize(
    ("flag", "chosen"), [("--processes", True), ("--no-processes", False), ("", None)]
)
def test_whether_there_are_processes_is_a_plain_flag(
    train: Calls, flag: str, chosen: bool | None
) -> None:
    assert command(f"train impala --env X --strategy actor-learner {flag}") == 0
    assert train[0][0][2] == ActorLearner(processes=chosen)


def test_a_strategy_option_alone_goes_to_the_default_strategy(train: Calls) -> None:
    assert command("train ppo --env X --sides critic") == 0
    assert train[0][0][2] == Local(sides=("critic",))


def test_an_option_of_another_strategy_is_refused(
    train: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("train ppo --env X --devices 2") == 2
    assert "Local, the strategy for X, has no option --devices" in capsys.readouterr().err


def test_the_same_python_is_shown_on_standard_error(
    train: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    command("train ppo --env X --strategy local --num-envs 4 --seed 3 --until 5 --json")
    out, err = capsys.readouterr()
    assert json.loads(out) == SUMMARY
    assert err == (
        "The same in Python:\n\n"
        "import dovetail as dt\n"
        "run = dt.train(\n"
        "    dt.algorithms.PPO(num_envs=4),\n"
        "    'X',\n"
        "    dt.strategies.Local(),\n"
        "    seed=3,\n"
        "    settings=dt.Settings(until=5.0),\n"
        ")\n\n"
    )


def test_quiet_shows_the_result_only(train: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train ppo --env X --quiet") == 0
    assert train[0][1]["settings"].display == "none"
    assert capsys.readouterr() == ("run runs/x\n", "")


def test_the_command_line_wins_over_the_config_file(train: Calls, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        'env = "A"\nseed = 1\ntotal_steps = 50\nuntil = 3\n'
        '[algorithm]\nname = "ppo"\nlearning-rate = 0.5\nhidden = [8]\nanneal = false\n'
        '[strategy]\nname = "local"\nnum_envs = 2\n'
        "[settings]\nepisodes = 7\n"
    )
    assert main(f"train --config {file} --seed 2 --learning-rate 0.25 --num-envs 3".split()) == 0
    (call,) = train
    assert call[0] == (
        PPO(num_envs=3, learning_rate=0.25, hidden_sizes=(8,), anneal_lr=False),
        "A",
        Local(),
    )
    assert call[1] == {"seed": 2, "total_steps": 50, "settings": Settings(until=3.0, episodes=7)}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sed = 1", "has an unknown key 'sed' at the top level: did you mean 'seed'?"),
        (
            "[algorithm]\nlearnin_rate = 1",
            "'learnin_rate' in [algorithm]: did you mean 'learning_rate'?",
        ),
        ("[settings]\nutil = 1", "'util' in [settings]: did you mean 'until'?"),
        ("[algoritm]\nx = 1", "'algoritm' at the top level: did you mean 'algorithm'?"),
        ("seed = 'a'", "--seed wants a whole number, not 'a'."),
        ("[algorithm]\nepochs = 'a'", "--epochs wants a whole number, not 'a'."),
        ("seed = ", "is not valid TOML"),
        ("strategy = 'fussed'", "There is no strategy called 'fussed': did you mean 'fused'?"),
        ("strategy = 3", "strategy wants text, not 3."),
        (
            "[algorithm]\nn_steps = 8",
            "'n_steps' in [algorithm]: it is called 'unroll_length' here.",
        ),
        ("[algorithm]\nminibatch_size = 8", "the nearest option is 'num_minibatches', the number"),
        (
            "[algorithm]\ndiscount = 0.9\ngamma = 0.9",
            "gives the option 'gamma' twice, by two names: leave one out.",
        ),
        (
            "steps = 8\ntotal_steps = 8",
            "gives the option 'total_steps' twice, by two names: leave one out.",
        ),
        (
            "policy = 'local'\nstrategy = 'local'",
            "has both 'policy', its earlier name, and 'strategy': leave one out.",
        ),
    ],
)
def test_a_wrong_config_file_is_a_sentence(
    train: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    assert main(["train", "ppo", "--env", "X", "--config", str(file)]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("\n") == 1
    assert not train


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("train", "Name an algorithm, as in `dovetail train ppo …`"),
        ("train ppo", "Name an environment, for instance: dovetail train ppo --env CartPole-v1."),
        ("train pppo --env X", "There is no algorithm called 'pppo': did you mean 'ppo'?"),
        ("train ppo --env X --strategy loca", "no strategy called 'loca': did you mean 'local'?"),
        (
            "train ppo --env X --lr 1",
            "train has no option --lr: it is called --learning-rate here.",
        ),
        ("train ppo --env X --ephochs=1", "has no option --ephochs: did you mean --epochs?"),
        ("train ppo --env X --qqq 1", "has no option --qqq: see dovetail train --help."),
        ("train ppo --env X --epochs 1.5", "--epochs wants a whole number, not '1.5'."),
        ("train ppo --env X --seed", "--seed wants a value"),
        ("train ppo --env X spare", "does not expect 'spare'"),
        ("train ppo --env X --config no.toml", "Cannot read the config file no.toml: No such file"),
        ("train ppo --resume runs/x", "strategy, so 'ppo' has no place beside it"),
        ("train --resume runs/x --seed 1", "strategy, so 'seed' has no place beside it"),
        ("train --resume runs/x --actors 3", "strategy, so 'actors' has no place beside it"),
        (
            "train ppo --env X --anneal=false",
            "has no option --anneal: it is called --anneal-lr here",
        ),
        ("train ppo --env X --anneal-lr=false", "write --anneal-lr or --no-anneal-lr, without a v"),
        ("train ppo --env X --anneal-lr false", "a flag is on as it stands, and off with --no-"),
        (
            "train ppo --env X --policy local --strategy fused",
            "--policy is the earlier name of --st",
        ),
        (
            "train dqn --env X --target-update-interval 500",
            "the nearest option is --tau, the target follows",
        ),
        (
            "train ppo --env X --minibatch-size 8",
            "the nearest option is --num-minibatches, the numb",
        ),
    ],
)
def test_a_wrong_line_is_a_sentence_and_trains_nothing(
    train: Calls, capsys: pytest.CaptureFixture[str], line: str, sentence: str
) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert sentence in err
    assert err.startswith("dovetail: ") and err.count("\n") == 1
    assert out == "" and not train


@pytest.mark.parametrize("name", ["evaluate-every", "checkpoint-every"])
def test_an_interval_in_an_unknown_unit_is_a_sentence(
    train: Calls, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(f"train ppo --env X --{name} 10parsecs".split()) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"dovetail: --{name} is 10parsecs: give 0 or more seconds, as 10, 10s or 5min, or "
        "environment steps, as 10000steps."
    )
    assert main(f"train ppo --env X --{name} 10000steps".split()) == 0
    assert getattr(train[0][1]["settings"], name.replace("-", "_")) == "10000steps"


def test_callbacks_are_given_by_name(train: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "ppo", "--env", "X", "--callback", "a.py:f"]) == 0
    assert main(["train", "ppo", "--env", "X", "--callback", "a.py:f,b.c:g"]) == 0
    assert [call[1]["callback"] for call in train] == ["a.py:f", ["a.py:f", "b.c:g"]]
    assert "run = dt.train(dt.algorithms.PPO(), 'X', callback='a.py:f')" in capsys.readouterr().err


def test_help_shows_the_options_of_the_chosen_strategy_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def shown(line: str) -> str:
        assert main(f"train ppo {line} --help".split()) == 0
        return capsys.readouterr().out

    assert {name for name, row in BACK_ENDS.items() if row.traced} == set(TRACED)
    default = shown("--env CartPole-v1")
    assert "options of Local, the default strategy:" in default and "--actors" not in default
    assert "--strategy NAME --help shows the options of another" in default
    compiled = shown("--env gymnax:CartPole-v1")
    assert "options of Fused, the default strategy:" in compiled and "--devices" in compiled
    chosen = shown("--strategy actor-learner")
    assert "options of ActorLearner:" in chosen and "--actors" in chosen
    assert "the default strategy" not in chosen and "--actor-devices" not in chosen


def test_resume(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = Calls()
    monkeypatch.setattr(dovetail, "resume", calls, raising=False)
    assert command("train --resume runs/x --total-steps 9 --json") == 0
    assert calls == [(("runs/x",), {"total_steps": 9})]
    out, err = capsys.readouterr()
    assert json.loads(out) == SUMMARY
    assert "run = dt.resume('runs/x', total_steps=9)" in err


def test_an_algorithm_from_a_file(
    train: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my_file.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from dovetail.algorithm import Algorithm\n"
        "@dataclass(frozen=True)\n"
        "class Mine(Algorithm):\n"
        "    '''My own.'''\n"
        "    width: int = 3\n"
        "    '''How wide.'''\n"
    )
    assert main(["train", f"{file}:Mine", "--env", "X", "--width", "5"]) == 0
    algorithm = train[0][0][0]
    assert type(algorithm).__name__ == "Mine" and algorithm.width == 5
    assert "from my_file import Mine\nrun = dt.train(Mine(width=5), 'X')" in capsys.readouterr().err
    assert main(["train", f"{file}:Mine", "--help"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"--width int +How wide \(default 3\)", told)
    assert re.search(r"--num-envs int +Environments that feed one update", told)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("class Mine:\n    width: int = 3\n", "mine.py:Mine is no algorithm, it has no method"),
        (
            "import dovetail as dt\nclass Mine(dt.Algorithm):\n    width: int = 3\n",
            "is it decorated with @dataclass(frozen=True)?",
        ),
    ],
)
def test_a_class_that_is_no_algorithm_is_refused(
    train: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, sentence: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    assert main(["train", f"{file}:Mine", "--env", "X", "--width", "5"]) == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]
    assert not train


def test_explain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Explanation:
        def __str__(self) -> str:
            return "the graph"

        def svg(self) -> str:
            return "<svg/>"

        def json(self) -> str:
            return '{"nodes": []}'

    seen: list[tuple[Any, ...]] = []

    def explain(*args: Any) -> Explanation:
        seen.append(args)
        return Explanation()

    monkeypatch.setattr(dovetail, "explain", explain, raising=False)
    file = tmp_path / "g.svg"
    assert main(f"explain ppo --env X --strategy fused --epochs 2 --svg {file}".split()) == 0
    assert seen == [(PPO(epochs=2), "X", Fused())]
    assert file.read_text() == "<svg/>"
    assert capsys.readouterr().out == f"the graph\nThe graph is drawn in {file}.\n"
    assert command("explain ppo --env X --json") == 0
    assert json.loads(capsys.readouterr().out) == {"nodes": []}
    assert main(f"explain ppo --env X --svg {tmp_path}/no/g.svg".split()) == 2
    assert f"Cannot use {tmp_path}/no/g.svg: No such file or directory." in capsys.readouterr().err
