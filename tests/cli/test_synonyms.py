"""Other libraries' names of options are answered with ours."""

import dataclasses

import pytest

from dovetail.algorithms import ALGORITHMS
from dovetail.cli.main import main
from dovetail.cli.options import flag
from dovetail.cli.synonyms import SYNONYMS, ours
from dovetail.loading import load_object
from dovetail.run.legacy import OPTIONS
from dovetail.run.settings import Settings
from dovetail.strategies import STRATEGIES

JOB = {"--total-steps", "--env", "--data", "--run", "--cluster", "--callback"}


def every_flag() -> set[str]:
    kinds = [load_object(target, "class") for target in (ALGORITHMS | STRATEGIES).values()]
    fields = [field for kind in (*kinds, Settings) for field in dataclasses.fields(kind)]
    return JOB | {flag(field.name) for field in fields}


def test_every_synonym_leads_to_an_option() -> None:
    wanted = {f"--{word}" for words in SYNONYMS.values() for word in words}
    assert wanted - every_flag() == set()


def test_every_option_that_was_renamed_is_answered() -> None:
    earlier = {flag(name)[2:] for name in OPTIONS}
    spelled = {"normalise-advantages", "normalise-observations", "normalise-rewards"}
    assert earlier - spelled - SYNONYMS.keys() == set()


def test_of_several_the_first_that_the_command_has() -> None:
    assert ours("--lambda", ["--gae-lambda", "--vtrace-lambda"]) == "--gae-lambda"
    assert ours("--lambda", ["--vtrace-lambda"]) == "--vtrace-lambda"
    assert ours("--no_anneal", ["--anneal-lr"]) == "--anneal-lr"
    assert ours("--lambda", ["--gamma"]) is None
    assert ours("--nonsense", ["--gamma"]) is None


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("train ppo --env X --n-steps 8", "--n-steps: it is called --unroll-length here."),
        ("train ppo --env X --clip_coef 0.1", "--clip-coef: it is called --clip-range here."),
        ("train dqn --env X --polyak 0.1", "--polyak: it is called --tau here."),
        ("train impala --env X --lambda 1", "--lambda: it is called --vtrace-lambda here."),
        ("train sac --env X --ent-coef 1", "--ent-coef: it is called --temperature here."),
        ("train ppo --env X --n-envs 4", "--n-envs: it is called --num-envs here."),
        ("train ppo --env X --steps 4", "--steps: it is called --total-steps here."),
    ],
)
def test_an_unknown_flag_is_answered(
    line: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    assert answer in capsys.readouterr().err
