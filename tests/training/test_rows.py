"""Which rows of metrics a run writes, and what they average over."""

from typing import Any

import numpy as np
import pytest

from dovetail.run.interval import Interval
from dovetail.run.settings import Settings
from dovetail.training.evaluation_schedule import EvaluationSchedule
from dovetail.training.recurrence import Recurrence
from dovetail.training.rows import (
    PendingRow,
    RecentEpisodes,
    columns,
    info_text,
    row_interval,
    unseen_text,
)


def ended(number: int, returns: float, *info: Any) -> list[Any]:
    """A report of one environment's episodes, each of length 7; `info` are sums [4 K]."""
    sums = [np.array([number]), np.array([number * returns]), np.array([number * 7])]
    return [*sums, np.array([info[0]])] if info else sums


def test_an_interval_in_steps_is_due_at_its_multiples() -> None:
    every = Recurrence(Interval(steps=100), 0.0, 130)
    assert every.by_steps and every.left(130) == 70 and every.left(200) == 100
    assert [every.due(9e9, steps) for steps in (130, 199, 200, 350)] == [False, False, True, True]
    every.restart(0.0, 200)
    assert not every.due(0.0, 299) and every.due(0.0, 300)


def test_an_interval_in_seconds_counts_from_the_last_time() -> None:
    every = Recurrence(Interval(10.0), 5.0, 0)
    assert not every.by_steps and every.left(7) == np.inf
    assert not every.due(14.9, 10**9) and every.due(15.0, 0)
    every.restart(15.0, 0)
    assert not every.due(24.9, 0)


def test_a_run_has_about_as_many_rows_whatever_its_length() -> None:
    assert [row_interval(steps).steps for steps in (1, 250, 251, 200_000)] == [1, 1, 2, 800]


def test_a_row_joins_reports_by_their_updates() -> None:
    pending = PendingRow()
    assert pending.take() == {}
    pending.add({"env_steps": 10, "loss": 1.0, "episodes": 2.0}, {"loss": 1.0}, 1)
    pending.add(
        {"env_steps": 40, "loss": 5.0, "episodes": 3.0, "eval_return": 7.0}, {"loss": 5.0}, 3
    )
    pending.add({"env_steps": 50, "episodes": 0.0}, {}, 1)
    row = {"env_steps": 50, "loss": 4.0, "episodes": 5.0, "eval_return": 7.0}
    assert pending.take() == row and pending.take() == {}


def test_returns_are_averaged_over_the_last_hundred_episodes() -> None:
    recent = RecentEpisodes()
    assert recent.mean_return() is None and recent.means() == {}
    for number, returns in ((500, 1000.0), (90, 10.0), (0, 0.0), (30, 20.0)):
        assert recent.add(ended(number, returns)) == {}
    assert recent.mean_return() == pytest.approx((90 * 10 + 30 * 20) / 120)
    assert recent.means()["episode_length"] == 7
    recent.add(ended(0, 0.0))  # nothing ended: the last ones still count
    assert recent.mean_return() == pytest.approx(12.5)


def test_every_seed_has_its_own_mean() -> None:
    recent = RecentEpisodes()
    recent.add([np.array([[1, 0], [0, 0]]), np.array([[4.0, 0.0], [0.0, 0.0]]), np.ones((2, 2))])
    assert recent.means() == {}  # the second seed has finished none
    recent.add([np.array([[0, 0], [1, 1]]), np.array([[0.0, 0.0], [8.0, 2.0]]), np.ones((2, 2))])
    assert columns(recent.means())["episode_return/seed1"] == 5.0
    assert recent.mean_return() == 4.5


def test_logged_values_are_means_over_steps_and_over_ends() -> None:
    recent = RecentEpisodes(["dist", "success"])
    # Sums and counts over steps, then over ends, each of dist and success.
    found = recent.add(ended(2, 0.0, [30.0, 0.0, 10.0, 0.0, 4.0, 1.0, 2.0, 2.0]))
    assert found == {"info_dist": 3.0}  # success appeared at no step that counts
    means = recent.means()
    assert (means["info_dist_final"], means["info_success_final"]) == (2.0, 0.5)
    assert recent.unseen == set()
    row = {"info_dist": 3.0, "info_dist_final": 2.0, "info_x": 0.25}
    assert info_text(row, ("dist", "x", "y")) == "dist 2 · x 0.25" and info_text(row, ()) is None


def test_a_key_that_never_appears_is_named() -> None:
    recent = RecentEpisodes(["dist", "typo"])
    recent.add(ended(1, 0.0, [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]))
    assert unseen_text(recent.unseen) == (
        "--log-info: no environment has reported typo in its info, so it is not logged."
    )


def schedule(**settings: Any) -> EvaluationSchedule:
    return EvaluationSchedule(Settings(**settings), 0.0, 0)


def test_evaluations_come_sooner_when_the_goal_may_be_reached() -> None:
    one = schedule(until=475, evaluate_every=1000)
    assert not one.wanted(1.0, 10, None) and not one.wanted(1.0, 10, 20.0)
    assert not one.wanted(2.0, 20, 247.0) and one.wanted(2.0, 20, 248.0)  # halfway from 20 to 475
    one.asked(2.0, 20)
    one.answered(4.0)
    assert not one.wanted(7.9, 30, 400.0) and one.wanted(8.0, 30, 400.0)  # it took 2 s
    assert not schedule(evaluate_every=1000).wanted(1.0, 10, 1e9)  # nobody asked for a goal


def test_a_negative_goal_is_neared_from_below() -> None:
    one = schedule(until=-200, evaluate_every=1000)
    assert not one.wanted(1.0, 10, -1400.0) and not one.wanted(1.0, 10, -801.0)
    assert one.wanted(1.0, 10, -799.0)


def test_evaluations_by_steps_come_at_their_steps_only() -> None:
    one = schedule(until=475, evaluate_every="100steps")
    assert one.by_steps and one.left(30) == 70
    assert not one.wanted(1e9, 99, 475.0) and one.wanted(0.0, 100, None)
    never = schedule(evaluate_every=0)
    assert not never.wanted(1e9, 10**9, None) and never.left(5) == np.inf
    several = schedule(seeds=2, evaluate_every="100steps")
    assert not several.due(0.0, 100) and several.left(5) == np.inf
