"""What the display says, and that it says it on standard error only."""

import io
import math

import pytest

from dovetail.errors import UserError
from dovetail.telemetry.progress import (
    LiveProgress,
    PlainProgress,
    Progress,
    count,
    duration,
    line,
    make_progress,
    number,
    panel,
    shares_text,
    sparkline,
)

SHARES = {"learn": 0.35, "unroll": 0.62, "other": 0.03, "tiny": 0.001}


def test_numbers_as_people_say_them():
    assert [count(x) for x in (0, 950, 12_345, 999_999, 4_560_000, 2e9, math.nan)] == [
        "0",
        "950",
        "12.3k",
        "1M",
        "4.56M",
        "2G",
        "—",
    ]
    assert [number(x) for x in (None, math.nan, 487.34, -1234.5, 0.1234)] == [
        "—",
        "—",
        "487.3",
        "-1,234.5",
        "0.123",
    ]
    assert [duration(x) for x in (42.4, 725, 11_220, math.inf)] == ["0:42", "12:05", "3:07:00", "—"]


def test_shares_are_sorted_and_tiny_ones_left_out():
    assert shares_text(SHARES) == "unroll 62 % · learn 35 % · other 3 %"


def test_sparkline():
    assert sparkline([], 8) == ""
    assert sparkline([5, 5, 5], 8) == "▁▁▁"
    assert sparkline([0, 7, 3.5], 3) == "▁█▅"
    assert sparkline([float(i) for i in range(160)], 8) == "▁▂▃▄▅▆▇█"


def test_plain_prints_every_few_seconds_and_at_the_end():
    now, stream = [0.0], io.StringIO()
    progress = PlainProgress(1000, stream, every=5.0, clock=lambda: now[0])
    for second in range(13):
        now[0] = float(second)
        progress.update(second * 10, 100.0, None if second < 3 else 20.5, None, SHARES)
    progress.message("a message")
    progress.close()
    progress.close()
    lines = stream.getvalue().splitlines()
    shares = "unroll 62 % · learn 35 % · other 3 %"
    assert lines == [
        f"10/1k steps  100 steps/s  return —  evaluation —  0:01 (0:10 left)  {shares}",
        f"60/1k steps  100 steps/s  return 20.5  evaluation —  0:06 (0:09 left)  {shares}",
        f"110/1k steps  100 steps/s  return 20.5  evaluation —  0:11 (0:09 left)  {shares}",
        "a message",
        f"120/1k steps  100 steps/s  return 20.5  evaluation —  0:12  {shares}",
    ]


def test_returns_are_thinned_evenly():
    progress = Progress(10)
    for step in range(1000):
        progress.update(step, 1.0, float(step), None, {})
    assert progress.returns.values == [float(step) for step in range(0, 1000, 8)]


def test_a_loss_is_shown_while_nobody_acts():
    from rich.console import Console

    progress = Progress(1000)
    for step in range(20):
        loss = "critic_loss", 2.0 - step / 10
        progress.update(step, 1.0, None, None, {}, loss=loss)
    assert "  critic loss 0.1  evaluation —  " in line(progress)
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as capture:
        console.print(panel(progress))
    assert "critic loss 0.1" in capture.get() and "█▇" in capture.get()
    progress.update(20, 1.0, 7.5, None, {})  # now it acts
    assert "  return 7.5  " in line(progress)


def test_panel_shows_everything():
    from rich.console import Console

    progress = Progress(1_000_000, clock=iter([0.0, 65.0]).__next__)
    progress.update(250_000, 50_000.0, 12.5, 480.0, SHARES, note="compiling")
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as capture:
        console.print(panel(progress))
    text = capture.get()
    for part in ("250k/1M steps", "50k steps/s", "1:05 · 0:15 left", "return 12.5", "480.0"):
        assert part in text
    assert "time unroll 62 % · learn 35 % · other 3 %" in text
    assert "compiling" in text


def test_live_shows_its_last_panel(capsys):
    progress = LiveProgress(100)
    progress.update(100, 10.0, 3.25, None, {})
    progress.message("[kept as written]")
    progress.close()
    progress.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert "[kept as written]" in err
    assert "return 3.25" in err


def test_live_without_a_terminal_is_plain(capsys):
    progress = make_progress("live", 100)
    assert isinstance(progress, PlainProgress)
    progress.update(50, 10.0, 1.0, 2.0, {})
    progress.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "50/100 steps  10 steps/s  return 1  evaluation 2  0:00\n"


def test_none_is_silent(capsys):
    progress = make_progress("none", 100)
    progress.update(50, 10.0, 1.0, 2.0, {})
    progress.message("text")
    progress.close()
    assert capsys.readouterr() == ("", "")


def test_an_unknown_display_is_refused():
    with pytest.raises(UserError, match="no display called 'lively': did you mean 'live'"):
        make_progress("lively", 1)  # pyright: ignore[reportArgumentType]
