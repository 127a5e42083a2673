"""Iterations of one step each are one compiled call; what they compute is the plain loop's."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agreement import ALGORITHMS, CONTINUOUS, HOST, HOST_PENDULUM, assert_close, without_order
from small import Started

import dovetail
from dovetail.algorithm import Algorithm
from dovetail.errors import UserError
from dovetail.runtime import local
from dovetail.runtime.execution import Execution
from dovetail.runtime.single_steps import StepRun
from dovetail.strategies import Local

ENVS, UPDATES = 3, 8
FRAGILE = f"{Path(__file__).parents[1] / 'fragile.py'}:Fragile"


def one_step(name: str, envs: int = ENVS) -> Algorithm:
    """An algorithm that learns after every step."""
    options: Any = {"unroll_length": 1, "num_envs": envs}
    return dataclasses.replace(ALGORITHMS[name], **options)


@pytest.mark.parametrize(
    ("name", "autoreset"),
    [
        ("dqn", "same_step"),
        ("dqn", "next_step"),
        ("rainbow", "next_step"),
        ("td3", "same_step"),
        ("sac-discrete", "next_step"),
    ],
)
def test_it_equals_the_plain_loop(name: str, autoreset: str) -> None:
    """In one go or in several, episodes that end on the way included."""
    env = f"{HOST_PENDULUM if name in CONTINUOUS else HOST}&autoreset={autoreset}"
    algorithm = one_step(name)
    state, _, actor = dovetail.interpret(
        algorithm, env, iterations=UPDATES, total_steps=1000, seed=0, debug=False
    )
    with Started(algorithm, env, Local()) as running:
        assert isinstance(running.runtime._run, StepRun)
        reports = [running.advance(count) for count in (1, 4, UPDATES - 5)]
    assert int(state.updates) == UPDATES
    assert_close(without_order(running.state), without_order(state))
    assert_close(running.actor, actor)
    ended = sum(report.episodes[0].sum() for report in reports)
    assert ended == ENVS * (UPDATES // (5 if autoreset == "same_step" else 6))


def test_it_reports_what_other_runs_report(monkeypatch: pytest.MonkeyPatch) -> None:
    with Started(one_step("dqn"), HOST, Local()) as running:
        found = [running.advance(UPDATES), running.advance(3)]
    monkeypatch.setattr(local, "single_steps", lambda *_: False)
    with Started(one_step("dqn"), HOST, Local()) as running:
        assert isinstance(running.runtime._run, Execution)
        others = [running.advance(UPDATES), running.advance(3)]
    for own, other in zip(found, others, strict=True):
        assert own.iterations == other.iterations and own.metrics.keys() == other.metrics.keys()
        assert own.metrics["loss"] > 0 and own.finite
        for name, value in other.metrics.items():
            np.testing.assert_allclose(own.metrics[name], value, rtol=1e-4, err_msg=name)
        for mine, theirs in zip(own.episodes, other.episodes, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_an_earlier_report_keeps_its_state() -> None:
    """What the program changes in place is the replay's, not the weights that were reported."""
    with Started(one_step("td3", 2), HOST_PENDULUM, Local()) as running:
        report = running.runtime.advance(4).wait()
        before = [np.array(leaf) for leaf in report.state().params["actor"]]
        running.runtime.advance(4).wait()
        after = report.state().params["actor"]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def test_what_an_environment_raises_is_told_and_the_state_is_kept() -> None:
    with Started(one_step("dqn", 2), f"{FRAGILE}?at=7", Local()) as running:
        running.advance(5)
        with pytest.raises(UserError, match="environment 0 raised ValueError in step at step 7"):
            running.runtime.advance(5)
        assert int(running.state.updates) == 5


def test_spans_add_up_to_the_time_spent() -> None:
    with Started(one_step("dqn"), HOST, Local()) as running:
        running.advance(2)
        [spans] = running.runtime.advance(600).wait().spans.values()
    computing = [span for span in spans if span.kind == "compute"]
    names = {span.name for span in computing}
    assert names == {"learner + replay + learner.2 + unroll.act", "unroll.step", "unroll.record"}
    calls = {name: sum(s.calls for s in computing if s.name == name) for name in names}
    assert calls["unroll.step"] == 600
    whole = max(s.start + s.seconds for s in computing) - min(s.start for s in computing)
    assert sum(s.seconds for s in computing) == pytest.approx(whole, rel=0.1)
