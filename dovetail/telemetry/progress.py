"""The progress display of a run, on standard error so that standard output stays clean.

`live` redraws a panel in a terminal, `plain` prints a line every few seconds, `none` is silent.
An update only stores numbers; the panel is redrawn a few times a second, whatever the update rate.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TextIO

from dovetail.errors import UserError, nearest

if TYPE_CHECKING:
    from rich.panel import Panel

Display = Literal["live", "plain", "none"]

_BARS = "▁▂▃▄▅▆▇█"
_MISSING = "—"


class ThinnedCurve:
    """At most 128 numbers, spread evenly over all that were added."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._seen = 0
        self._stride = 1

    def add(self, value: float) -> None:
        """Adds a number, if it is finite; drops every second one when there are too many."""
        if not math.isfinite(value):
            return
        if self._seen % self._stride == 0:
            self.values.append(value)
        self._seen += 1
        if len(self.values) > 128:
            # Halves the resolution: constant memory however long the run is.
            self.values = self.values[::2]
            self._stride *= 2


class Progress:
    """The interface of progress displays; this class stores the numbers and shows nothing."""

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_steps = total_steps
        self.clock = clock
        self.began = clock()
        self.env_steps = 0
        self.steps_per_s = math.nan
        self.episode_return: float | None = None
        self.eval_return: float | None = None
        self.shares: Mapping[str, float] = {}
        self.note: str | None = None
        self.closed = False
        self.loss: tuple[str, float] | None = None
        """Name and value of a loss, shown in place of the return while nobody acts."""
        self.returns = ThinnedCurve()
        """The returns so far."""
        self.losses = ThinnedCurve()
        """The losses so far, while nobody acts."""

    def update(
        self,
        env_steps: int,
        steps_per_s: float,
        episode_return: float | None,
        eval_return: float | None,
        shares: Mapping[str, float],
        note: str | None = None,
        loss: tuple[str, float] | None = None,
    ) -> None:
        """Updates the numbers; `shares` are the fragments' shares of the time, from 0 to 1.

        `loss` has the name and the value to show in place of a return while nobody acts.
        """
        self.env_steps, self.steps_per_s = env_steps, steps_per_s
        self.episode_return, self.eval_return = episode_return, eval_return
        self.shares, self.note, self.loss = shares, note, loss
        if episode_return is not None:
            self.returns.add(episode_return)
        if loss is not None:
            self.losses.add(loss[1])

    def message(self, text: str) -> None:
        """Shows a line that stays on the screen."""

    def close(self) -> None:
        """Shows the final state and releases the screen; safe to call twice."""
        self.closed = True

    @property
    def elapsed(self) -> float:
        """Seconds since the display was created."""
        return self.clock() - self.began

    @property
    def left(self) -> float:
        """Remaining seconds at the current speed; NaN while unknown."""
        if not self.steps_per_s > 0:
            return math.nan
        return max(self.total_steps - self.env_steps, 0) / self.steps_per_s


class PlainProgress(Progress):
    """Prints a line every few seconds, for logs, pipes and CI."""

    def __init__(
        self,
        total_steps: int,
        stream: TextIO | None = None,
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(total_steps, clock)
        self._stream = stream or sys.stderr
        self._every = every
        self._due = clock() + min(every, 1.0)  # the first line comes after a second

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Prints a line if the last one is `every` seconds old."""
        super().update(*args, **kwargs)
        if self.clock() >= self._due:
            self._due = self.clock() + self._every
            self.message(line(self))

    def message(self, text: str) -> None:
        """Prints a line."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Prints the final state."""
        first, self.closed = not self.closed, True
        if first and self.env_steps:
            self.message(line(self))


class LiveProgress(Progress):
    """Shows a panel in the terminal, redrawn four times a second by rich."""

    def __init__(self, total_steps: int) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(total_steps)
        self._live = Live(
            get_renderable=lambda: panel(self),
            console=Console(stderr=True),
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._live.start()

    def message(self, text: str) -> None:
        """Prints a line above the panel."""
        from rich.text import Text

        self._live.console.print(Text(text))

    def close(self) -> None:
        """Leaves the last panel on the screen."""
        self.closed = True
        self._live.stop()


def make_progress(display: Display, total_steps: int) -> Progress:
    """Creates the display; `live` becomes `plain` if standard error is not a terminal."""
    if display == "none":
        return Progress(total_steps)
    if display == "plain" or (display == "live" and not sys.stderr.isatty()):
        return PlainProgress(total_steps)
    if display == "live":
        return LiveProgress(total_steps)
    hint = nearest(display, ("live", "plain", "none"))
    raise UserError(f"There is no display called {display!r}: {hint}")


def line(progress: Progress) -> str:
    """All numbers in one line of text."""
    elapsed = duration(progress.elapsed)
    parts = [
        f"{count(progress.env_steps)}/{count(progress.total_steps)} steps",
        f"{count(progress.steps_per_s)} steps/s",
        " ".join(_learning(progress)),
        f"evaluation {number(progress.eval_return)}",
        elapsed if progress.closed else f"{elapsed} ({duration(progress.left)} left)",
        shares_text(progress.shares),
        progress.note or "",
    ]
    return "  ".join(part for part in parts if part)


def panel(progress: Progress) -> "Panel":
    """The live panel: progress bar and speed, returns with their curve, shares of time."""
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    top = Table.grid(padding=(0, 2), expand=True)
    top.add_column(ratio=1)
    for _ in range(3):
        top.add_column(no_wrap=True, justify="right")
    left = "" if progress.closed else f" · {duration(progress.left)} left"
    top.add_row(
        ProgressBar(max(progress.total_steps, 1), progress.env_steps, complete_style="cyan"),
        f"{count(progress.env_steps)}/{count(progress.total_steps)} steps",
        Text(f"{count(progress.steps_per_s)} steps/s", style="bold"),
        duration(progress.elapsed) + left,
    )
    name, value = _learning(progress)
    curve = progress.returns if progress.loss is None else progress.losses
    returns = Text.assemble(
        (f"{name} ", "dim"),
        (value, "bold green"),
        ("   greedy evaluation ", "dim"),
        (number(progress.eval_return), "bold green"),
        "   ",
        (sparkline(curve.values, 32), "green"),
    )
    rows: list[Table | Text] = [top, returns]
    if progress.shares:
        rows.append(Text.assemble(("time ", "dim"), shares_text(progress.shares)))
    if progress.note:
        rows.append(Text(progress.note, style="dim"))
    body = Table.grid(expand=True)
    for row in rows:
        body.add_row(row)
    return Panel(body, border_style="dim")


def _learning(progress: Progress) -> tuple[str, str]:
    """What tells how learning goes, and its value: the return, or a loss while nobody acts."""
    if progress.loss is None:
        return "return", number(progress.episode_return)
    return progress.loss[0].replace("_", " "), number(progress.loss[1])


def sparkline(values: list[float], width: int) -> str:
    """Draws values as bars between their minimum and maximum, averaged to fit `width`."""
    if not values:
        return ""
    groups = [
        values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)
    ]
    means = [sum(group) / len(group) for group in groups if group]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def shares_text(shares: Mapping[str, float]) -> str:
    """`unroll 62 % · learn 35 % · other 3 %`, largest first, without shares below 0.5 %."""
    known = sorted(shares.items(), key=lambda item: -item[1])
    return " · ".join(f"{name} {share:.0%}"[:-1] + " %" for name, share in known if share >= 0.005)


def number(value: float | None) -> str:
    """Formats a return to four digits: 487.3; a dash if there is none yet."""
    if value is None or not math.isfinite(value):
        return _MISSING
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"


def count(value: float) -> str:
    """Abbreviates a large number: 950, 12.3k, 4.56M."""
    if not math.isfinite(value):
        return _MISSING
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Formats seconds as a clock: 0:42, 12:05, 3:07:00."""
    if not math.isfinite(seconds):
        return _MISSING
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
