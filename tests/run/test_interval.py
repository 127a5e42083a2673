"""Intervals in seconds and in steps, as people write them."""

import math

import pytest

from dovetail.errors import UserError
from dovetail.run.interval import Interval
from dovetail.run.settings import Settings


@pytest.mark.parametrize(
    ("written", "interval"),
    [
        (10, Interval(10.0)),
        (0, Interval(0.0)),
        ("10", Interval(10.0)),
        ("1e9", Interval(1e9)),
        ("2.5s", Interval(2.5)),
        ("5 min", Interval(300.0)),
        ("2h", Interval(7200.0)),
        ("10000steps", Interval(math.inf, 10_000)),
        ("10_000 Steps", Interval(math.inf, 10_000)),
        ("1e4steps", Interval(math.inf, 10_000)),
        ("1step", Interval(math.inf, 1)),
    ],
)
def test_what_is_understood(written: float | str, interval: Interval) -> None:
    assert Interval.of(written, "evaluate_every") == interval
    assert interval.is_zero == (interval.seconds == 0)


@pytest.mark.parametrize(
    "written", ["10parsecs", "steps", "-1s", "0steps", "1.5steps", "", "1.2.3s", -1, math.nan, True]
)
def test_anything_else_is_refused(written: float | str) -> None:
    with pytest.raises(UserError) as refused:
        Settings(checkpoint_every=written)
    assert str(refused.value) == (
        f"--checkpoint-every is {written}: give 0 or more seconds, as 10, 10s or 5min, or "
        "environment steps, as 10000steps."
    )
