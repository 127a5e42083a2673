"""Learning curves of one run or of several runs in one figure.

Runs that differ only in their seed become one curve, the interquartile mean with a bootstrap
confidence band (https://arxiv.org/abs/2108.13264). matplotlib is used through its object interface,
not pyplot, so that the global state of the user's program does not change.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dovetail.errors import UserError, nearest
from dovetail.run.folder import Run, write_atomically
from dovetail.telemetry.metric_names import main_loss
from dovetail.telemetry.progress import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The Okabe-Ito palette, which is safe for color-blind readers."""

LINES = ("-", "--", ":", "-.")
"""Line styles, used once the colors are exhausted."""

FORMATS = ("png", "svg", "pdf")
TITLE: dict[str, Any] = {"loc": "left", "fontsize": "medium"}
POINTS = 256
"""Number of points of the grid on which seeds are compared."""

NAMES = ("algorithm", "env", "strategy")
OPTIONS = ("options", "strategy_options")
"""The parts of the config that runs must share to count as seeds of one curve."""

Curve = tuple[np.ndarray, np.ndarray]
"""x (ascending) and y, both [points] and finite."""


@dataclass(frozen=True)
class SeedGroup:
    """Curves that differ only in their seed."""

    label: str
    curves: tuple[Curve, ...]


def learning_curve(run: Run, path: str | Path | None = None) -> Path:
    """Draws the run's training and evaluation returns; by default to learning_curve.png.

    A run that learns from recorded data also has the curve of its loss.
    """
    metrics = run.metrics
    named = (("episode_return", "training"), ("eval_return", "greedy evaluation"))
    found = [(label, curves(metrics, "env_steps", name)) for name, label in named]
    groups = [SeedGroup(label, tuple(several)) for label, several in found if several]
    loss = main_loss(metrics) if run.config.get("data") else None
    losses = () if loss is None else tuple(curves(metrics, "env_steps", loss))
    if not groups and not losses:
        raise UserError(
            f"{run.path} has no return to draw yet: wait until the first episodes have ended."
        )
    figure, axes = _figure()
    for index, group in enumerate(groups):
        _draw(axes, group, COLORS[index], LINES[0])
    if groups and (threshold := _threshold(run)) is not None:
        axes.axhline(threshold, color="0.35", linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.plot([], [], color="0.35", linestyle=(0, (4, 3)), label=f"threshold {threshold:g}")
    if loss is not None and losses:
        beside = axes.twinx() if groups else axes
        _draw(beside, SeedGroup(_words(loss), losses), COLORS[2], LINES[1])
        beside.set_ylabel(_words(loss))
    config = run.config
    axes.set_title(" · ".join(str(config[k]) for k in NAMES if config.get(k)), **TITLE)
    _label_axes(axes, "env_steps", "episode_return" if groups else str(loss), [run])
    _add_time_axis(axes, metrics)
    figure.legend(loc="outside lower center", ncols=len(groups) + 2, frameon=False)
    return _save(figure, Path(path) if path is not None else run.path / "learning_curve.png")


def plot(
    runs: Sequence[Run | str],
    path: str | Path | None = None,
    x: Literal["env_steps", "time_s"] = "env_steps",
    y: str | None = None,
) -> Path:
    """Draws the metric `y` of several runs against `x`; by default to plot.png.

    The default metric is the first that all of them have: the return of episodes, that of
    evaluations, or the loss. The default file is in the run's folder for one run, and in the
    current folder for several.
    """
    opened = [run if isinstance(run, Run) else Run.open(run) for run in runs]
    if not opened:
        raise UserError("There is no run to draw: name at least one run folder.")
    if x not in ("env_steps", "time_s"):
        hint = nearest(x, ("env_steps", "time_s"))
        raise UserError(f"Curves cannot be drawn against {x!r}: {hint}")
    figure, axes = _figure()
    y = _default_metric(opened) if y is None else y
    title, groups = _groups(opened, x, y)
    for index, group in enumerate(groups):
        style = LINES[index // len(COLORS) % len(LINES)]
        _draw(axes, group, COLORS[index % len(COLORS)], style)
    band = "interquartile mean over seeds, 95 % bootstrap interval"
    seeded = any(len(group.curves) > 1 for group in groups)
    axes.set_title("\n".join(filter(None, [title, band if seeded else ""])), **TITLE)
    _label_axes(axes, x, y, opened)
    figure.legend(loc="outside lower center", ncols=_legend_columns(groups), frameon=False)
    default = opened[0].path / "plot.png" if len(opened) == 1 else Path("plot.png")
    return _save(figure, Path(path) if path is not None else default)


def _default_metric(runs: Sequence[Run]) -> str:
    """The first of return, evaluation return and loss that all runs have; else the return."""
    found = [run.metrics for run in runs]
    known = ["episode_return", "eval_return", *filter(None, map(main_loss, found[:1]))]
    shared = (y for y in known if all(curves(metrics, "env_steps", y) for metrics in found))
    return next(shared, known[0])


def curves(metrics: dict[str, np.ndarray], x: str, y: str) -> list[Curve]:
    """The curves of column `y`: one, or one per column `y/seed0`, `y/seed1`, …"""
    seeded = [name for name in metrics if name.startswith(f"{y}/seed")]
    found: list[Curve] = []
    for name in seeded or [y]:
        if name not in metrics or x not in metrics:
            continue
        known = np.isfinite(metrics[x]) & np.isfinite(metrics[name])
        order = np.argsort(metrics[x][known], kind="stable")
        if known.any():
            found.append((metrics[x][known][order], metrics[name][known][order]))
    return found


def on_common_grid(several: Sequence[Curve]) -> Curve | None:
    """Interpolates curves to (x [points], y [curves, points]) on the range that all of them cover;
    None if there is no such range."""
    start = max(x[0] for x, _ in several)
    end = min(x[-1] for x, _ in several)
    if end <= start:
        return None
    grid = np.linspace(start, end, POINTS)
    return grid, np.stack([np.interp(grid, x, y) for x, y in several])


def _groups(runs: Sequence[Run], x: str, y: str) -> tuple[str, list[SeedGroup]]:
    """Returns the label that all runs share, and groups of runs that differ only in their seed, in
    order of first appearance."""
    members: dict[str, list[Curve]] = {}
    for run in runs:
        config, metrics = run.config, run.metrics
        found = curves(metrics, x, y)
        if not found:
            raise _missing(run, metrics, y)
        key = json.dumps({name: config.get(name) for name in (*NAMES, *OPTIONS)}, sort_keys=True)
        members.setdefault(key, []).extend(found)
    title, labels = _labels([json.loads(key) for key in members])
    several = [tuple(found) for found in members.values()]
    return title, [SeedGroup(label, found) for label, found in zip(labels, several, strict=True)]


def _labels(configs: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """Returns the label that all configs share, and a distinguishing label for each.

    Options are included only where algorithm, env and strategy are not enough.
    """
    if len(configs) == 1:
        return "", [" · ".join(str(configs[0][k]) for k in NAMES if configs[0][k]) or "run"]
    shared = [name for name in NAMES if len({str(config[name]) for config in configs}) == 1]
    differ = [name for name in NAMES if name not in shared]
    names = [tuple(str(config[k]) for k in differ if config[k]) for config in configs]
    flat = [{k: v for name in OPTIONS for k, v in (c[name] or {}).items()} for c in configs]
    labels: list[str] = []
    for mine, options in zip(names, flat, strict=True):
        twins = [other for its, other in zip(names, flat, strict=True) if its == mine]
        told = [k for k in options if any(other.get(k) != options[k] for other in twins)]
        labels.append(" · ".join([*mine, *(f"{k}={options[k]}" for k in told)]))
    title = " · ".join(str(configs[0][name]) for name in shared if configs[0][name])
    return title, labels


def _missing(run: Run, metrics: dict[str, np.ndarray], y: str) -> UserError:
    """The error for a run whose column `y` is missing or empty."""
    if not metrics or not len(next(iter(metrics.values()))):
        return UserError(f"{run.path} has no metrics yet: wait until its training has begun.")
    if y in metrics or any(name.startswith(f"{y}/seed") for name in metrics):
        return UserError(f"{run.path} has no value of {y!r} yet: wait, or draw another metric.")
    names = dict.fromkeys(name.split("/seed")[0] for name in metrics)
    return UserError(f"{run.path} has no metric called {y!r}: {nearest(y, names)}")


def _figure() -> "tuple[Figure, Axes]":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _draw(axes: "Axes", group: SeedGroup, color: str, style: str) -> None:
    """Draws one seed as it is, several as their interquartile mean with its 95 % band."""
    from dovetail.functions.statistics import bootstrap_interval, interquartile_mean

    common = on_common_grid(group.curves) if len(group.curves) > 1 else None
    if common is None:
        for index, (x, y) in enumerate(group.curves):
            marker = "o" if len(x) < 40 else None
            label = None if index else group.label
            axes.plot(x, y, style, color=color, marker=marker, markersize=3.5, label=label)
        return
    grid, values = common
    low, high = bootstrap_interval(values, confidence=0.95)
    axes.fill_between(grid, low, high, color=color, alpha=0.2, linewidth=0)
    label = f"{group.label} ({len(values)} seeds)"
    axes.plot(grid, interquartile_mean(values, axis=0), style, color=color, label=label)


def steps_of(runs: Sequence[Run]) -> str:
    """The unit of the runs' steps, in words."""
    kinds = {
        "environment steps"
        if config.get("data") is None
        else "gradient steps, then environment steps"
        if config.get("online_steps")
        else "gradient steps"
        for config in (run.config for run in runs)
    }
    return kinds.pop() if len(kinds) == 1 else "steps"


def _label_axes(axes: "Axes", x: str, y: str, runs: Sequence[Run]) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter

    names = {
        "env_steps": steps_of(runs),
        "time_s": "wall time",
        "episode_return": "episode return",
        "eval_return": "greedy evaluation return",
    }
    axes.set_xlabel(names[x])
    axes.set_ylabel(names.get(y, _words(y)))
    axes.set_xlim(left=0)
    if x == "env_steps":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    else:
        longest = axes.get_xlim()[1]
        axes.xaxis.set_major_formatter(FuncFormatter(lambda t, _: _time_text(t, longest)))


def _words(column: str) -> str:
    """The name of a column, in words."""
    return column.replace("_", " ")


def _add_time_axis(axes: "Axes", metrics: dict[str, np.ndarray]) -> None:
    """Adds wall times along the top, if steps increase with time."""
    from matplotlib.ticker import MaxNLocator

    for times, steps in curves(metrics, "time_s", "env_steps"):
        if np.any(np.diff(steps) < 0) or steps[-1] <= steps[0]:
            return
        ticks = MaxNLocator(6).tick_values(times[0], times[-1])
        ticks = [tick for tick in ticks if times[0] <= tick <= times[-1]]
        top = axes.secondary_xaxis("top")
        top.spines["top"].set_visible(False)
        labels = [_time_text(tick, times[-1]) for tick in ticks]
        top.set_xticks(np.interp(ticks, times, steps).tolist(), labels)
        top.tick_params(length=3, colors="0.35", labelsize="small")
        top.set_xlabel("wall time", color="0.35", fontsize="small")


def _time_text(seconds: float, longest: float) -> str:
    """Formats seconds on an axis that ends at `longest`: 12 s, or 3:20 with minutes."""
    return f"{seconds:g} s" if longest < 180 else duration(seconds)


def _threshold(run: Run) -> float | None:
    """The return that counts as solved, from the summary or the settings."""
    settings = run.config.get("settings") or {}
    found = (run.summary.get("threshold"), run.config.get("threshold"), settings.get("until"))
    return next((float(value) for value in found if value is not None), None)


def _legend_columns(groups: Sequence[SeedGroup]) -> int:
    """The number of columns that fit under the figure."""
    longest = max(len(group.label) for group in groups) + 10
    return max(1, min(len(groups), 100 // longest))


def _save(figure: "Figure", path: Path) -> Path:
    """Writes the figure in the format of the file's suffix."""
    ending = path.suffix.removeprefix(".").lower()
    if ending not in FORMATS:
        raise UserError(
            f"A plot cannot be written as {path.name!r}: end the name in .png, .svg or .pdf."
        )
    picture = io.BytesIO()
    figure.savefig(picture, format=ending)
    write_atomically(path, picture.getvalue())
    return path
