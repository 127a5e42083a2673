"""Callbacks: what they see, how they stop a run, and what is said when they fail."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import LENGTH, QUIET, a2c, saved

import dovetail
from dovetail import TrainingEvent
from dovetail.cli.main import main
from dovetail.errors import UserError
from dovetail.run.folder import Run
from dovetail.strategies import Fused
from dovetail.training import loop as loop_module
from dovetail.training.callbacks import Callbacks

ENV = "dovetail:CartPole-v1"
EACH = LENGTH * 4
"""Steps of an update."""


def event(name: Any = "report", step: int = 12_000) -> TrainingEvent:
    return TrainingEvent(name, step, 3, 100, 1.5, {"loss": 2.0}, None, Run("runs/x"))


def test_the_first_false_stops_and_nothing_else_does() -> None:
    answers: list[Any] = [None, True, 0, "", np.True_, np.False_, False]
    callbacks = Callbacks([lambda _: answers.pop(0), lambda _: None])
    for _ in range(5):
        callbacks.call(event())
        assert callbacks.stopped_by is None
    callbacks.call(event())
    assert callbacks.stopped_by is not None and "<lambda>" in callbacks.stopped_by
    ended = Callbacks(lambda _: False)
    ended.call(event("end"))
    assert ended.stopped_by is None and ended and not Callbacks()


class Counting:
    """A callback with a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, event: TrainingEvent) -> None:
        self.calls += 1
        raise RuntimeError("no more")


def test_a_callback_that_raises_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def inner(x):\n    return 1 / x\n\ndef look(event):\n    return inner(0)\n")
    with pytest.raises(UserError) as raised:
        Callbacks(f"{file}:look").call(event())
    assert str(raised.value) == (
        f"The callback look raised at {file}:2, at step 12,000: "
        "ZeroDivisionError: division by zero."
    )
    with pytest.raises(UserError, match=rf"Counting raised at {__file__}:\d+, .*: no more\.$"):
        Callbacks(Counting()).call(event())


BAD: list[tuple[Any, str]] = [
    ("nowhere.py:look", "There is no file .*nowhere.py: check the path"),
    ("no_such_module:look", "The module 'no_such_module' for the callback cannot be loaded"),
    ("math:sine", "math has no callback 'sine': did you mean 'sin'?"),
    ("math:pi", "The callback math:pi is a float: give a function of one argument, the event"),
    ("look", "'look' names no callback: write file.py:Name"),
    (Counting, "The callback Counting is a class: give a function of one argument"),
    (lambda: None, "cannot take an event .too many positional arguments.: give a function of one"),
    ([Counting(), 3], "The callback int is a int: give a function"),
]


@pytest.mark.parametrize(("given", "told"), BAD)
def test_what_cannot_be_called_is_refused_before_the_run(given: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        Callbacks(given)


@pytest.mark.slow
def test_a_callback_sees_every_event_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[TrainingEvent] = []
    settings = replace(
        QUIET,
        folder=str(tmp_path / "run"),
        evaluate_every=f"{4 * EACH}steps",
        checkpoint_every=f"{5 * EACH}steps",
        keep=9,
    )
    run = dovetail.train(
        a2c(num_envs=4),
        ENV,
        Fused(),
        total_steps=10 * EACH,
        settings=settings,
        callback=[seen.append],
    )
    places = {
        name: [e.step // EACH for e in seen if e.name == name]
        for name in ("report", "evaluation", "checkpoint", "end")
    }
    assert places["report"][-1] == 10 and places["end"] == [10]
    assert places["evaluation"] == [4, 8] and places["checkpoint"] == [5, 10, 10]
    assert all(e.update == e.step // EACH and e.total_steps == 10 * EACH for e in seen)
    last = seen[-1]
    assert last.name == "end" and last.eval_return == last.run.summary["final_return"]
    report = next(e for e in seen if e.name == "report")
    assert report.metrics["updates"] == report.update and "loss" in report.metrics
    assert [p.name for p in sorted((run.path / "checkpoints").iterdir())] == ["10", "5"]
    # The evaluations are in the rows of their steps, and the final one is there too.
    metrics = run.metrics
    evaluated = metrics["env_steps"][~np.isnan(metrics["eval_return"])] / EACH
    assert evaluated.tolist() == [4, 8, 10]
    assert metrics["eval_return"][-1] == run.summary["final_return"]
    assert np.all(np.diff(metrics["env_steps"]) >= 0)


@pytest.mark.slow
def test_a_callback_stops_a_run_and_a_failing_one_leaves_it_to_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop_module, "REPORT_SECONDS", 0.0)  # a report after every update
    file, folder = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(
        "def early(event):\n"
        "    return event.update < 3\n\n"
        "def fails(event):\n"
        "    if event.update == 6:\n"
        "        raise ValueError('no good')\n"
    )
    line = f"train a2c --env {ENV} --strategy fused --num-envs 4 --unroll-length {LENGTH}"
    line += f" --hidden-sizes 8 --total-steps {10 * EACH} --episodes 2 --no-video"
    assert main([*line.split(), "--callback", f"{file}:early", "--run", str(folder)]) == 0
    told = capsys.readouterr().err
    assert f"callback='{file}:early'" in told and "The callback early stopped the run." in told
    run = Run.open(folder)
    assert run.summary["updates"] == 3 and run.config["callback"] == [f"{file}:early"]
    assert main(["train", "--resume", str(folder), "--callback", f"{file}:fails"]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == (
        f"dovetail: The callback fails raised at {file}:6, at step {6 * EACH}: ValueError: no good."
        f" Update 6 is saved: once that is repaired, go on with dovetail train --resume {folder}"
    )
    assert saved(run)[1]["updates"] == 6
    dovetail.resume(folder, callback=lambda event: None)
    assert run.summary["updates"] == 10 and run.config["callback"] == []
