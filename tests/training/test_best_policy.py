"""The best policy is kept beside the last, in every kind of run, and outlives a resumption."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from small import LENGTH, QUIET, a2c, numbers, saved

import dovetail as dt
from dovetail.algorithm import Task
from dovetail.envs.resolve import resolve
from dovetail.evaluation.evaluate import Evaluation
from dovetail.evaluation.trained import load_trained
from dovetail.run.checkpoint import Checkpoints
from dovetail.run.folder import Run
from dovetail.strategies.fused import Fused
from dovetail.training import loop as loop_module
from dovetail.training import session
from dovetail.training.best_policy import BestPolicy
from dovetail.training.loop import Reached

STEPS = 30 * LENGTH * 4
CARTPOLE = "dovetail:CartPole-v1"
RETURNS = [3.0, 9.0, 9.0, 5.0]
"""Of the first evaluations; later ones return 1."""


class Scripted:
    """An evaluator with the returns of a script."""

    seen: list[np.ndarray]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Scripted.seen = []

    def __call__(self, params: Any) -> Evaluation:
        Scripted.seen.append(numbers(params))
        number = len(Scripted.seen) - 1
        value = RETURNS[number] if number < len(RETURNS) else 1.0
        return Evaluation(np.full(2, value), np.ones(2, int), 0)

    def calling_seconds(self) -> float:
        return 0.0

    def cancel(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[np.ndarray]]:
    """A run, and the parameters that its evaluations saw."""
    folder = tmp_path_factory.mktemp("scripted") / "run"
    settings = dataclasses.replace(
        QUIET, evaluate_every=1e-9, checkpoint_every=0.0, keep=100, folder=str(folder)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_module, "REPORT_SECONDS", 0.0)  # a report after every update
        patch.setattr(session, "Evaluator", Scripted)
        run = dt.train(a2c(num_envs=4), CARTPOLE, Fused(), total_steps=STEPS, settings=settings)
    assert len(Scripted.seen) > len(RETURNS)
    return run, Scripted.seen


def test_the_first_of_the_highest_is_the_best(scripted: tuple[Run, list[np.ndarray]]) -> None:
    run, seen = scripted
    trained = load_trained(run)
    assert trained.which == "best"
    np.testing.assert_array_equal(numbers(trained.params[0]), seen[1])
    summary = run.summary
    assert summary["best_return"] == 9.0 and summary["final_return"] == 1.0
    assert summary["best_step"] == trained.env_steps < STEPS
    assert summary["best_policy"] == "policy/best"
    record = json.loads((run.path / "policy" / "best" / "policy.json").read_text())
    assert (record["return"], record["episodes"]) == (9.0, 2)
    assert len(list((run.path / "policy" / "best").iterdir())) == 2


def test_the_last_and_a_checkpoint_are_taken_when_asked_for(
    scripted: tuple[Run, list[np.ndarray]],
) -> None:
    run, seen = scripted
    last = load_trained(run, which="last")
    np.testing.assert_array_equal(numbers(last.params[0]), seen[-1])
    assert (last.env_steps, last.which) == (STEPS, "last")
    assert dt.load(run, "last").env_steps == STEPS and dt.load(run, "last").mean_return == 1.0
    assert dt.load(run).mean_return == 9.0
    number = Checkpoints(run.path / "checkpoints").steps()[0]
    tree, _ = saved(run, number)
    early = load_trained(run, which=number)
    np.testing.assert_array_equal(numbers(early.params[0].network), numbers(tree["state"].params))
    policy = dt.load(run, number)
    assert (policy.updates, policy.env_steps) == (number, number * 4 * LENGTH)
    assert policy.mean_return is None


@pytest.mark.parametrize(
    ("which", "sentence"),
    [("bst", "no policy 'bst': give best, last"), (7000, "No checkpoint 7000 in .*: choose one")],
)
def test_a_policy_that_there_is_not_is_a_sentence(
    scripted: tuple[Run, list[np.ndarray]], which: Any, sentence: str
) -> None:
    with pytest.raises(dt.UserError, match=sentence):
        dt.load(scripted[0], which)
    with pytest.raises(dt.UserError, match=sentence):
        dt.evaluate_run(scripted[0], which=which)


def test_one_folder_holds_one_policy(scripted: tuple[Run, list[np.ndarray]]) -> None:
    folder = scripted[0].path / "policy"
    assert dt.load(folder / "last").mean_return == 1.0
    assert dt.load(folder).mean_return == 9.0
    with pytest.raises(dt.UserError, match="holds one policy, so there is none to choose"):
        dt.load(folder / "last", "best")


def offered(run: Run, *returns: float) -> BestPolicy:
    """The best policy of a run to which policies with these returns were offered, one per step."""
    bound = a2c(num_envs=4).bind(Task(resolve(CARTPOLE).spec, 4, STEPS))
    params = bound.acting(bound.init(jax.random.key(0)))
    best = BestPolicy(run, bound, lambda told: None)
    for number, value in enumerate(returns):
        found = Evaluation(np.full(2, value), np.ones(2, int), 0)
        best.offer(params, Reached(number, 10 * number), found)
    return best


def test_a_resumed_run_keeps_the_best_so_far(tmp_path: Path) -> None:
    run = Run.create(str(tmp_path / "run"), "run", {})
    assert offered(run).summary()["best_return"] is None
    assert offered(run, 3.0, np.nan, 7.0, 5.0).summary()["best_step"] == 20
    assert offered(run, 6.0).summary() == {
        "best_return": 7.0,
        "best_step": 20,
        "best_policy": "policy/best",
    }
    assert offered(run, 8.0).summary()["best_return"] == 8.0


def test_a_best_policy_that_cannot_be_read_is_replaced(tmp_path: Path) -> None:
    run = Run.create(str(tmp_path / "run"), "run", {})
    offered(run, 7.0)
    (run.path / "policy" / "best" / "policy.json").write_text("{")
    assert offered(run, 3.0).summary()["best_return"] == 3.0


def test_a_best_policy_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    run = Run.create(str(tmp_path / "run"), "run", {})
    (run.path / "policy").write_text("in the way")
    assert offered(run, 7.0).summary()["best_return"] is None


def test_with_several_seeds_the_best_is_that_of_the_best_seed(tmp_path: Path) -> None:
    settings = dataclasses.replace(QUIET, seeds=2, folder=str(tmp_path / "run"))
    run = dt.train(a2c(num_envs=4), CARTPOLE, Fused(), total_steps=STEPS, settings=settings)
    summary = run.summary
    assert summary["best_return"] == max(summary["final_returns"])
    everyone = dt.evaluate_run(run, episodes=2)
    assert (everyone.which, len(everyone.returns)) == ("last", 4)
    alone = dt.evaluate_run(run, episodes=2, which="best")
    assert alone.mean == summary["best_return"]
    assert dt.load(run).mean_return == dt.load(run, "last").mean_return == summary["best_return"]
