"""Evaluation beside training: it changes nothing, and a run ends with what it saw."""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import LENGTH, QUIET, a2c, numbers, saved

import dovetail
from dovetail.evaluation.evaluate import Evaluation
from dovetail.run.checkpoint import Checkpoints
from dovetail.strategies.fused import Fused
from dovetail.strategies.interface import Strategy
from dovetail.strategies.local import Local
from dovetail.training import loop as loop_module
from dovetail.training import session
from dovetail.training.background_evaluation import BackgroundEvaluation
from dovetail.training.signals import Stop

STEPS = 30 * LENGTH * 4
OFTEN = dataclasses.replace(QUIET, evaluate_every=1e-9)


@pytest.mark.parametrize(
    ("env", "strategy"),
    [("dovetail:CartPole-v1", Fused()), ("gymnasium:CartPole-v1", Local())],
    ids=["fused", "local"],
)
def test_evaluation_never_disturbs_training(
    env: str, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "REPORT_SECONDS", 0.0)  # a report after every update
    asked = 0
    ask = BackgroundEvaluation.ask

    def counted(self: BackgroundEvaluation, *args: Any) -> None:
        nonlocal asked
        asked += 1
        ask(self, *args)

    monkeypatch.setattr(BackgroundEvaluation, "ask", counted)
    never = dovetail.train(a2c(num_envs=4), env, strategy, total_steps=STEPS, settings=QUIET)
    assert asked == 1  # the one at the end
    often = dovetail.train(a2c(num_envs=4), env, strategy, total_steps=STEPS, settings=OFTEN)
    assert asked > 2
    np.testing.assert_array_equal(numbers(saved(often)[0]), numbers(saved(never)[0]))
    assert often.summary["final_return"] == never.summary["final_return"]


class Pretending:
    """An evaluator that finds the goal reached at the third look, and then is asked no more."""

    looks = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: list[np.ndarray] = []

    def __call__(self, params: Any) -> Evaluation:
        self.seen.append(numbers(params.network))
        Pretending.last = self
        value = 100.0 if len(self.seen) == 3 else 0.0
        return Evaluation(np.full(2, value), np.ones(2, int), 0)

    def calling_seconds(self) -> float:
        return 0.0

    def cancel(self) -> None: ...

    def close(self) -> None: ...

    last: "Pretending"


@pytest.mark.parametrize("strategy", [Fused(), Local()], ids=["fused", "local"])
def test_a_run_ends_with_the_weights_that_reached_the_goal(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(session, "Evaluator", Pretending)
    settings = dataclasses.replace(OFTEN, until=50.0, checkpoint_every=0.0, keep=100)
    run = dovetail.train(
        a2c(num_envs=4), "dovetail:Chain-v0", strategy, total_steps=100 * STEPS, settings=settings
    )
    summary = run.summary
    assert summary["final_return"] == 100.0 and summary["time_to_threshold_s"] > 0
    assert summary["updates"] < 3000
    tree, meta = saved(run)
    assert meta["updates"] == summary["updates"] == int(tree["state"].updates)
    np.testing.assert_array_equal(numbers(tree["state"].params), Pretending.last.seen[2])
    for which in ("best", "last"):
        exported = dovetail.load(run, which)
        assert (exported.mean_return, exported.updates) == (100.0, summary["updates"])


def test_going_back_drops_the_checkpoints_after_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=5)
    for step, there in ((2, [2]), (4, [2, 4]), (6, [2, 4, 6]), (4, [2, 4]), (3, [2, 3])):
        checkpoints.save(step, {"weight": np.full(2, step)}, {})
        checkpoints.wait()
        assert checkpoints.steps() == there
    assert [path.name for path in sorted(checkpoints.folder.iterdir())] == ["2", "3"]
    tree, _ = checkpoints.restore({"weight": np.zeros(2, int)})
    assert tree["weight"].tolist() == [3, 3]
    checkpoints.close()


def test_waiting_for_an_evaluation_ends_when_asked_to_stop() -> None:
    started = threading.Event()

    class Endless(Pretending):
        def __init__(self) -> None:
            self.cancelled = threading.Event()

        def __call__(self, params: Any) -> Any:
            started.set()
            assert self.cancelled.wait(60)

        def cancel(self) -> None:
            self.cancelled.set()

    stop = Stop()
    stop.training(lambda: None)
    evaluations = BackgroundEvaluation(Endless())  # type: ignore[arg-type]
    threading.Timer(0.05, lambda: (started.wait(), stop.ask(2))).start()
    assert evaluations.evaluate(None, stop) is None
    assert not evaluations.busy


def test_an_error_in_an_evaluation_is_raised_where_its_result_is_asked_for() -> None:
    class Failing(Pretending):
        def __call__(self, params: Any) -> Any:
            raise ValueError("no such weights")

    evaluations = BackgroundEvaluation(Failing())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no such weights"):
        evaluations.evaluate(None, Stop())
