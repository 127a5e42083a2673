"""The real commands on a tiny run, and the mistakes that only the real functions can find."""

import inspect
import json
import re
from pathlib import Path

import pytest

import dovetail
from dovetail.cli.main import main

TINY = (
    "--env CartPole-v1 --strategy local --num-envs 2 --unroll-length 8 --num-minibatches 2 "
    "--epochs 1"
    " --hidden-sizes 4 --episodes 2 --evaluate-every 0 --no-video"
)
FIELDS = (
    "algorithm env strategy seed env_steps updates wall_s compile_s steps_per_s final_return"
    " time_to_threshold_s threshold run best_return best_step best_policy"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "tiny"
    assert (
        main(["train", "ppo", *TINY.split(), "--total-steps", "64", "--run", str(run), "--quiet"])
        == 0
    )
    return run


@pytest.mark.slow
def test_train_leaves_a_run_and_resume_goes_on_with_it(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {path.name for path in trained.iterdir()}
    assert {
        "config.json",
        "plan.txt",
        "metrics.csv",
        "checkpoints",
        "policy",
        "graph.svg",
    } <= names
    assert json.loads((trained / "summary.json").read_text())["env_steps"] == 64
    assert main(["train", "--resume", str(trained), "--total-steps", "96", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told.keys() >= set(FIELDS.split())
    assert (told["env_steps"], told["updates"]) == (96, 6)


def test_eval_plot_and_explain(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(trained), "--episodes", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["episodes"] == 3 == len(told["returns"])
    assert main(["plot", str(trained), "--out", str(trained / "p.svg")]) == 0
    assert capsys.readouterr().out == f"The plot is {trained / 'p.svg'}.\n"
    assert main(["explain", "ppo", "--env", "CartPole-v1", "--hidden-sizes", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"graph", "plan"}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("train ppo --env CartPol-v1", "'CartPol-v1': did you mean 'CartPole-v1'?"),
        ("train ppo --env gymnasium:Acrobot-v1 --strategy fused", "use --strategy local"),
        ("train ppo --env CartPole-v1 --total-steps 0", "--total-steps is 0: give 1 or more."),
        ("train ppo --env CartPole-v1 --run RUN", "is not empty"),
        ("train --resume RUN/config.json", "is a file, but a run is a folder"),
        ("train --resume RUN/absent", "There is no run at"),
        ("eval RUN/checkpoints", "is not a run"),
        ("eval RUN --episodes 0", "give 1 or more"),
        ("watch RUN/config.json", "is a file, but a run is a folder"),
        ("plot RUN --y los", "did you mean 'loss'?"),
        ("plot RUN --x updates", "Curves cannot be drawn against 'updates'"),
        ("explain ppo --env gymnasium:Acrobot-v1 --strategy fused", "use --strategy local"),
    ],
)
def test_a_mistake_is_a_sentence(
    trained: Path, capsys: pytest.CaptureFixture[str], line: str, sentence: str
) -> None:
    assert main(line.replace("RUN", str(trained)).split()) == 2
    out, err = capsys.readouterr()
    assert sentence in err.splitlines()[-1]
    assert out == "" and "Traceback" not in err


@pytest.mark.parametrize(
    ("command", "function", "names"),
    [
        ("train", dovetail.train, ("total_steps", "seed")),
        ("eval", dovetail.evaluate_run, ("episodes", "seed")),
    ],
)
def test_the_help_tells_the_defaults_of_the_function(
    capsys: pytest.CaptureFixture[str], command: str, function: object, names: tuple[str, ...]
) -> None:
    assert callable(function)
    assert main([command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in names:
        default = inspect.signature(function).parameters[name].default
        assert re.search(rf"--{name.replace('_', '-')} N [^()]*\(default {default:_}\)", text), name
