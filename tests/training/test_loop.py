"""The loop itself: how often it reports, what it remembers, how much."""

import itertools
import math
import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from small import QUIET

from dovetail.errors import UserError
from dovetail.evaluation.evaluate import Evaluation
from dovetail.runtime.report import Report
from dovetail.telemetry.progress import Progress
from dovetail.telemetry.sinks import MetricsWriter
from dovetail.training.background_evaluation import Result
from dovetail.training.loop import Loop, Reached, Snapshot
from dovetail.training.signals import Stop


class Pretended:
    """A runtime that counts instead of training: one episode of return `updates` per update."""

    compile_seconds = 0.0
    seconds: dict[str, float] = {}  # noqa: RUF012

    class graph:
        steps_per_iteration = 20
        offline_steps = 0

    def __init__(self) -> None:
        self.state = np.zeros(())
        self.chunks: list[int] = []

    def advance(self, count: int) -> "Done":
        self.chunks.append(count)
        self.state = self.state + count
        ends, state = float(self.state) * count, self.state
        nothing: Any = tuple  # the state of no actors
        return Done(
            Report(
                count,
                {"loss": np.array(2.0 * count, np.float32)},
                [np.array([count, 0]), np.array([ends, 0.0]), np.array([5 * count, 0])],
                lambda replay=True: state,
                nothing,
                {"staleness": 0.5},
            )
        )


@dataclass
class Done:
    """Iterations that are over already."""

    report: Report

    def wait(self) -> Report:
        return self.report


class Nothing:
    """No evaluation, no checkpoints."""

    busy = False

    def __init__(self) -> None:
        self.saved: list[tuple[int, dict[str, Any]]] = []

    def results(self) -> list[Any]:
        return []

    def ask(self, *args: Any) -> None:
        raise AssertionError("nobody wants an evaluation")

    def save(self, step: int, tree: Any, meta: dict[str, Any]) -> None:
        self.saved.append((step, meta))


class Kept:
    """A sink that remembers its rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def write(self, step: int, scalars: Any) -> None:
        self.rows.append({"step": step, **scalars})

    def close(self) -> None: ...


def ran(steps: int, runtime: Any = None, reached: Reached | None = None) -> tuple[Loop, Any, Kept]:
    runtime, kept, nothing = runtime or Pretended(), Kept(), Nothing()
    recorder = MetricsWriter([kept])
    reached = reached or Reached()
    start = Snapshot(lambda: runtime.state, lambda: (), reached.updates, reached.env_steps)
    loop = Loop(
        runtime,
        start,
        reached,
        QUIET,
        threshold=None,
        acting=lambda state: state,
        began=0.0,
    )
    loop.run(steps, Stop(), recorder, Progress(steps), nothing, nothing, {"algorithm": "x"})  # type: ignore[arg-type]
    loop.save(nothing)  # type: ignore[arg-type]
    loop.write_row(recorder)
    recorder.close()
    return loop, nothing, kept


def test_it_stops_at_the_total_and_rounds_it_up() -> None:
    loop, nothing, kept = ran(steps=990)
    assert sum(loop.runtime.chunks) == 50  # type: ignore[attr-defined]
    assert (loop.reached.updates, loop.reached.env_steps) == (50, 1000)
    step, meta = nothing.saved[-1]
    assert step == 50 and (meta["updates"], meta["env_steps"]) == (50, 1000)
    assert meta["algorithm"] == "x"
    assert kept.rows[-1]["updates"] == 50 and kept.rows[-1]["env_steps"] == 1000


def test_dispatches_grow_by_at_most_a_factor_of_two() -> None:
    loop, _, _ = ran(steps=200_000)
    chunks = loop.runtime.chunks  # type: ignore[attr-defined]
    assert chunks[:2] == [1, 1]
    growing = chunks[: chunks.index(40)]
    assert all(after <= 2 * before for before, after in itertools.pairwise(growing))
    assert sum(chunks) == 10_000 and max(chunks) == 40  # one of 250 rows


def test_reports_are_about_as_far_apart_as_they_should_be() -> None:
    loop, _, _ = ran(steps=20)
    for seconds, chunk in ((0.15, 2), (0.2, 1), (0.11, 2), (0.3, 1), (9.0, 1)):
        loop._chunk = 1
        loop._adapt(1, seconds)
        assert loop._chunk == chunk


def test_rows_hold_means_over_their_updates() -> None:
    _, _, kept = ran(steps=1000)
    for row in kept.rows:
        assert row["loss"] == 2.0 and row["episode_length"] == 5.0
        # About the last hundred episodes, of which the one of update n returns n or a little more.
        assert 0 <= row["episode_return"] <= row["updates"]
        assert row["step"] == row["env_steps"] == 20 * row["updates"]
        assert row["staleness"] == 0.5  # as measured, not summed


def test_what_is_resumed_is_not_done_again() -> None:
    loop, nothing, kept = ran(steps=1000, reached=Reached(updates=45, env_steps=900))
    assert sum(loop.runtime.chunks) == 5  # type: ignore[attr-defined]
    assert nothing.saved[-1][0] == 50 and kept.rows[0]["updates"] > 45
    loop, nothing, _ = ran(steps=100, reached=Reached(updates=45, env_steps=900))
    assert loop.runtime.chunks == [] and nothing.saved[-1][0] == 45  # type: ignore[attr-defined]


def test_nothing_that_it_remembers_grows() -> None:
    loop, _, _ = ran(steps=2_000_000)
    few, _, _ = ran(steps=2_000)
    for name, value in vars(loop).items():
        if isinstance(value, deque):
            assert value.maxlen is not None and value.maxlen <= 50, name
        elif isinstance(value, list | dict | set):
            before = len(getattr(few, name))
            assert len(value) == before, name


def test_a_recorder_that_cannot_keep_up_drops_the_oldest() -> None:
    gate = threading.Event()

    class Slow(Kept):
        def write(self, step: int, scalars: Any) -> None:
            assert gate.wait(60)
            super().write(step, scalars)

    kept = Slow()
    recorder = MetricsWriter([kept], capacity=16)
    for step in range(1000):
        recorder.record(step, {"loss": 1.0})
    assert len(recorder._waiting) <= 16
    gate.set()
    recorder.close()
    assert kept.rows[-1]["step"] == 999 and len(kept.rows) <= 17
    assert recorder.dropped == 1000 - len(kept.rows)


def test_time_to_threshold_counts_earlier_starts() -> None:
    loop, _, _ = ran(steps=20, reached=Reached(seconds=100.0))
    loop.threshold = 1.0

    class Found(Nothing):
        def results(self) -> list[Any]:
            evaluation = Evaluation(np.array([2.0]), np.array([1]), 0)
            return [Result(Snapshot(lambda: (), lambda: (), 1, 20), 7.0, evaluation)]

    loop._collect(Found(), row := {})  # type: ignore[arg-type]
    assert loop.reached.time_to_threshold == 107.0 and row == {"eval_return": 2.0}
    assert not loop.solved  # nobody asked to stop there


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_goes_on_while_the_state_that_reached_the_goal_is_saved(fails: bool) -> None:
    under_way: set[int] = set()

    class Going(Done):
        def wait(self) -> Report:
            under_way.discard(id(self))
            if fails and solved:
                raise UserError("A worker died after the goal was reached.")
            return self.report

    class Busy(Pretended):
        def advance(self, count: int) -> Done:
            going = Going(super().advance(count).report)
            under_way.add(id(going))
            return going

    class Found(Nothing):
        def results(self) -> list[Any]:
            solved.append(True)
            evaluation = Evaluation(np.array([2.0]), np.array([1]), 0)
            return [Result(Snapshot(state, lambda: (), 1, 20), 7.0, evaluation)]

    def state() -> Any:
        asked.append(len(under_way))
        return ()

    solved: list[bool] = []
    asked: list[int] = []
    runtime: Any = Busy()
    loop = Loop(
        runtime,
        Snapshot(lambda: (), lambda: (), 0, 0),
        Reached(),
        replace(QUIET, until=1.0, evaluate_every=9),
        threshold=1.0,
        acting=lambda state: state,
        began=0.0,
    )
    found: Any = Found()
    recorder = MetricsWriter([])
    loop.run(1000, Stop(), recorder, Progress(1000), found, found, {})
    recorder.close()
    assert loop.solved and under_way
    loop.save(found)
    assert asked == [0] and found.saved[-1][0] == 1


def test_speed_is_unknown_before_the_first_report() -> None:
    loop, _, _ = ran(steps=20, reached=Reached(updates=9, env_steps=180))
    assert math.isnan(loop.steps_per_s)
