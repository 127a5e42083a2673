"""Learning curves: which runs are one curve, what the pictures hold, what is refused."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.errors import UserError
from dovetail.run.folder import Run
from dovetail.telemetry import plot as module
from dovetail.telemetry.plot import _default_metric, curves, learning_curve, on_common_grid, plot

CONFIG = {"algorithm": "ppo", "env": "dovetail:CartPole-v1", "strategy": "fused"}


def make_run(path: Path, columns: Mapping[str, list[float]], **config: Any) -> Run:
    run = Run.create(str(path), "x", {**CONFIG, **config})
    rows = zip(*columns.values(), strict=True)
    lines = [",".join("" if math.isnan(x) else str(x) for x in row) for row in rows]
    run.write_text("metrics.csv", "\n".join([",".join(columns), *lines]) + "\n")
    return run


def columns(returns: list[float]) -> dict[str, list[float]]:
    steps = [100.0 * i for i in range(len(returns))]
    return {"time_s": [s / 10 for s in steps], "env_steps": steps, "episode_return": returns}


@pytest.fixture
def drawn(monkeypatch):
    """The axes of every figure that is drawn."""
    seen, make = [], module._figure

    def figure():
        seen.append(make()[1])
        return seen[-1].figure, seen[-1]

    monkeypatch.setattr(module, "_figure", figure)
    return seen


def lines(axes) -> dict[str, tuple[list[float], list[float]]]:
    """Label → (x, y) of each line with data."""
    found = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in found
        if len(line.get_xdata())
    }


def test_curves_leave_out_gaps_and_sort():
    metrics = {
        "env_steps": np.array([0.0, 20, 10, 30, math.nan]),
        "a": np.array([1.0, 3, 2, math.nan, 9]),
        "b/seed0": np.array([1.0, 1, 1, 1, 1]),
        "b/seed1": np.full(5, math.nan),
    }
    ((x, y),) = curves(metrics, "env_steps", "a")
    np.testing.assert_array_equal(x, [0, 10, 20])
    np.testing.assert_array_equal(y, [1, 2, 3])
    assert len(curves(metrics, "env_steps", "b")) == 1
    assert curves(metrics, "env_steps", "c") == []


def test_common_grid_is_where_all_curves_are():
    first = (np.array([0.0, 100]), np.array([0.0, 1]))
    second = (np.array([50.0, 150]), np.array([5.0, 15]))
    common = on_common_grid([first, second])
    assert common is not None
    grid, values = common
    assert (grid[0], grid[-1]) == (50, 100)
    np.testing.assert_allclose(values[:, [0, -1]], [[0.5, 1], [5, 10]])
    assert on_common_grid([first, (np.array([200.0]), np.array([1.0]))]) is None


def test_learning_curve_of_a_run(tmp_path, drawn):
    data = columns([10.0, 20.0, 40.0])
    data["eval_return"] = [math.nan, 25.0, math.nan]
    run = make_run(tmp_path / "a", data, settings={"until": 30.0})
    path = learning_curve(run)
    assert path == run.path / "learning_curve.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn
    assert lines(axes) == {
        "training": ([0, 100, 200], [10, 20, 40]),
        "greedy evaluation": ([100], [25]),
    }
    assert [list(line.get_ydata()) for line in axes.get_lines()][2] == [30, 30]
    assert axes.get_title(loc="left") == "ppo · dovetail:CartPole-v1 · fused"
    (top,) = axes.child_axes
    ticks = dict(zip([t.get_text() for t in top.get_xticklabels()], top.get_xticks(), strict=True))
    assert (ticks["0 s"], ticks["8 s"], ticks["20 s"]) == (0, 80, 200)


def test_learning_curve_of_several_seeds_in_one_run(tmp_path, drawn):
    data = columns([0.0, 0.0])
    data["episode_return/seed0"] = [0.0, 10.0]
    data["episode_return/seed1"] = [4.0, 14.0]
    learning_curve(make_run(tmp_path / "a", data))
    ((x, y),) = lines(drawn[0]).values()
    assert list(lines(drawn[0])) == ["training (2 seeds)"]
    np.testing.assert_allclose([x[0], x[-1], y[0], y[-1]], [0, 100, 2, 12])


def test_seeds_are_one_curve_with_a_band(tmp_path, drawn):
    runs = [
        make_run(tmp_path / str(seed), columns([float(seed), seed + 10.0]), seed=seed)
        for seed in range(5)
    ]
    other = make_run(tmp_path / "other", columns([7.0, 8.0]), strategy="local")
    path = plot([*runs, str(other.path)], tmp_path / "all.svg")
    assert "<svg" in path.read_text()
    (axes,) = drawn
    found = lines(axes)
    assert list(found) == ["fused (5 seeds)", "local"]
    np.testing.assert_allclose([found["fused (5 seeds)"][1][i] for i in (0, -1)], [2, 12])
    assert found["local"] == ([0, 100], [7, 8])
    (band,) = axes.collections
    low, high = band.get_paths()[0].get_extents().get_points()
    assert (low[0], high[0]) == (0, 100)
    assert 0 <= low[1] < 2 < 12 < high[1] <= 14
    assert axes.get_title(loc="left") == (
        "ppo · dovetail:CartPole-v1\ninterquartile mean over seeds, 95 % bootstrap interval"
    )


def test_options_tell_runs_apart_where_names_do_not(tmp_path, drawn):
    data = columns([1.0, 2.0])
    one = make_run(tmp_path / "1", data, options={"rate": 0.1, "epochs": 4})
    two = make_run(tmp_path / "2", data, options={"rate": 0.2, "epochs": 4})
    three = make_run(tmp_path / "3", data, algorithm="dqn", options={"size": 9})
    plot([one, two, three], tmp_path / "x.png", x="time_s")
    assert list(lines(drawn[0])) == ["ppo · rate=0.1", "ppo · rate=0.2", "dqn"]
    assert drawn[0].get_xlabel() == "wall time"


def test_default_places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [make_run(tmp_path / name, columns([1.0, 2.0])) for name in "ab"]
    assert plot(runs[:1]) == runs[0].path / "plot.png"
    assert plot(runs) == Path("plot.png")


def test_a_run_without_returns_draws_its_loss(tmp_path):
    steps = [100.0, 200.0, 300.0]
    data = {"time_s": [1.0, 2.0, 3.0], "env_steps": steps, "actor_loss": [3.0, 2.0, 1.0]}
    run = make_run(tmp_path / "a", data, data={"folder": "d"})
    assert _default_metric([run]) == "actor_loss"
    assert plot([run], tmp_path / "a.png").stat().st_size
    assert learning_curve(run).stat().st_size
    evaluated = {**data, "critic_loss": [1.0, 1.0, 1.0], "eval_return": [math.nan, 5.0, 9.0]}
    other = make_run(tmp_path / "b", evaluated, data={"folder": "d"})
    assert _default_metric([other]) == "eval_return" and learning_curve(other).stat().st_size
    assert _default_metric([run, other]) == "actor_loss"


def test_pyplot_is_left_alone(tmp_path):
    import sys

    before = "matplotlib.pyplot" in sys.modules
    plot([make_run(tmp_path / "a", columns([1.0, 2.0]))])
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_what_cannot_be_drawn_is_a_sentence(tmp_path):
    run = make_run(tmp_path / "a", columns([math.nan, math.nan]))
    empty = Run.create(str(tmp_path / "b"), "x", CONFIG)
    with pytest.raises(UserError, match="no metric called 'episode_retrun': did you mean 'episode"):
        plot([run], y="episode_retrun")
    with pytest.raises(UserError, match="no value of 'episode_return' yet"):
        plot([run])
    with pytest.raises(UserError, match="has no metrics yet"):
        plot([empty])
    with pytest.raises(UserError, match="no return to draw yet"):
        learning_curve(empty)
    with pytest.raises(UserError, match="no run to draw"):
        plot([])
    with pytest.raises(UserError, match="cannot be drawn against 'steps'"):
        plot([run], x="steps")  # pyright: ignore[reportArgumentType]
    good = make_run(tmp_path / "c", columns([1.0]))
    with pytest.raises(UserError, match=r"end the name in \.png, \.svg or \.pdf"):
        plot([good], tmp_path / "x.jpg")
    with pytest.raises(UserError, match=r"Cannot write .*No such file"):
        plot([good], tmp_path / "none" / "x.png")


@pytest.mark.parametrize(
    ("configs", "label"),
    [
        ([{}], "environment steps"),
        ([{"data": "kept", "online_steps": 0}] * 2, "gradient steps"),
        ([{"data": "kept", "online_steps": 9}], "gradient steps, then environment steps"),
        ([{}, {"data": "kept", "online_steps": 0}], "steps"),
    ],
)
def test_steps_are_called_what_they_are(tmp_path: Path, drawn, configs, label: str):
    made = [
        make_run(tmp_path / str(at), columns([1.0, 2.0]), seed=at, **config)
        for at, config in enumerate(configs)
    ]
    plot(made, tmp_path / "drawn.svg")
    assert drawn[-1].get_xlabel() == label
