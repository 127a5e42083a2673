"""The entrance: exit codes, help, and the commands about runs."""

import json
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import dovetail
from dovetail.cli import listing
from dovetail.cli.main import COMMANDS, main
from dovetail.errors import UserError


def command(text: str) -> int:
    return main(text.split())


def raising(error: BaseException) -> Any:
    """Raises in Python's own code: in a test's, it would be a user's."""
    return Mock(side_effect=error)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("Do this."), 2, "dovetail: Do this.\n"),
        (KeyboardInterrupt(), 130, "dovetail: Interrupted.\n"),
        (
            ZeroDivisionError("by\nzero"),
            1,
            "dovetail: ZeroDivisionError: by zero. Run with --debug for the traceback.\n",
        ),
        (
            PermissionError(13, "Permission denied", "/etc/x"),
            2,
            "dovetail: Cannot use /etc/x: Permission denied.\n",
        ),
        (
            BrokenPipeError(32, "Broken pipe"),
            1,
            "dovetail: BrokenPipeError: [Errno 32] Broken pipe.",
        ),
    ],
)
def test_a_failure_is_a_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    line: str,
) -> None:
    monkeypatch.setattr(listing, "run", raising(error))
    assert main(["list"]) == code
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == 1
    assert command("list --debug") == code
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_ends_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "\nexample:\n" in out
    assert out.splitlines()[-1].startswith(f"  dovetail {name}")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert out.splitlines()[-1] == "  dovetail train ppo --env CartPole-v1 --until 475"


def test_an_unknown_command_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == (
        "dovetail: dovetail has no command 'trian': did you mean 'train'?\n"
    )


def test_a_reader_that_goes_away_is_silent() -> None:
    program = "from dovetail.cli.main import main; import sys; sys.exit(main(['--help'] ))"
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.stdin.read(); {program}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(b"")
    assert (process.returncode, err) == (141, b"")


def test_eval(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from dovetail.evaluation.evaluate import Evaluation

    seen: list[Any] = []

    def evaluate_run(run: str, **numbers: int) -> Evaluation:
        seen.append((run, numbers))
        return Evaluation(np.array([1.0, 3.0]), np.array([4, 5]), 0, "best", 1200)

    monkeypatch.setattr(dovetail, "evaluate_run", evaluate_run, raising=False)
    assert command("eval runs/x --episodes 2 --seed 7") == 0
    assert seen == [("runs/x", {"episodes": 2, "seed": 7})]
    assert capsys.readouterr().out == (
        "2 greedy episodes of the best policy, of step 1,200: mean return 2 (95 % confidence 1 to "
        "3), mean length 4.5.\n"
    )
    assert command("eval runs/x --json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["returns"] == [1.0, 3.0] and told["mean_return"] == 2.0
    assert (told["policy"], told["env_steps"]) == ("best", 1200)
    assert command("eval runs/x --checkpoint 12 --env my.py:Env --algorithm my.py:Mine") == 0
    assert seen[-1][1] == {"which": 12, "env": "my.py:Env", "algorithm": "my.py:Mine"}
    assert command("eval runs/x --checkpoint lst") == 2
    told = capsys.readouterr().err
    assert "--checkpoint wants one of best, last or a whole number, not 'lst'." in told


def test_watch_and_plot_pass_on_what_was_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def public(*args: Any, **kwargs: Any) -> str:
        seen.append((args, kwargs))
        return "file"

    monkeypatch.setattr(dovetail, "watch", public, raising=False)
    monkeypatch.setattr(dovetail, "plot", public, raising=False)
    assert command("watch runs/x --out v.mp4 --seed 3") == 0
    assert command("watch runs/x --window") == 0
    assert command("plot runs/x runs/y --x time_s --y loss --out p.png") == 0
    assert seen == [
        (("runs/x",), {"out": "v.mp4", "seed": 3}),
        (("runs/x",), {"window": True}),
        ((["runs/x", "runs/y"], "p.png"), {"x": "time_s", "y": "loss"}),
    ]
    assert capsys.readouterr().out.splitlines()[-1] == "The plot is file."


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("list --json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert set(listed) == {"algorithms", "strategies", "environments", "wrappers"}
    assert (
        listed["strategies"]["fused"]
        == "One compiled program for everything; needs a JAX environment."
    )
    assert {"ppo", "a2c", "reinforce"} <= set(listed["algorithms"])
    assert "gymnasium" in listed["environments"]
    assert main(["list"]) == 0
    assert "\n  ppo " in capsys.readouterr().out
    assert main(["list", "wrappers", "--json"]) == 0
    assert "frame-stack" in json.loads(capsys.readouterr().out)["wrappers"]


def test_list_of_environments(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("list envs cartpole --json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["dovetail"] == ["CartPole-v1"] and "CartPole-v1" in listed["gymnasium"]
    assert command("list envs PONG --backend ale") == 0
    assert "ale:pong" in capsys.readouterr().out.split()
    assert command("list envs PONG --backend gymnasium") == 0
    assert capsys.readouterr().out == "gymnasium:ALE/Pong-v5\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("list wrapers", "shows no 'wrapers': did you mean 'wrappers'?"),
        ("list envs cartpool", "has 'cartpool' in its name: did you mean 'CartPole-v1'?"),
        ("list envs xyzzy", "in its name: `dovetail list envs` shows what there is."),
        ("list envs --backend ala", "no back end 'ala': did you mean 'ale'?"),
        ("list ppo --backend ale", "shows no 'ppo'"),
        ("list algorithms ppo", "takes text for environments only: write `dovetail list envs`."),
    ],
)
def test_a_list_of_nothing_says_so(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(words) == 2
    assert said in capsys.readouterr().err
