"""Where the time of a run went: its plan with what was measured, like SQL's EXPLAIN ANALYZE."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.errors import UserError
from dovetail.graph.show import Row, count, quantity, table
from dovetail.plan import serial
from dovetail.plan.ir import Plan
from dovetail.run import Run
from dovetail.telemetry.spans import COMPUTE, LINK, WAIT
from dovetail.telemetry.timeline import FILE, FORMAT

DRIVER = "driver"
IDLE = 0.2
"""A worker that waits for less than this share of the time holds the others up."""
HELP = {
    "step": (
        "environment steps",
        "more workers that step (--policy environments or actor-learner), or a back end that is "
        "compiled (EnvPool, a JAX environment)",
    ),
    "act": ("acting", "more environments for each call of it (--envs, --policy central-inference)"),
    "learn": ("learning", "more devices (--policy data-parallel), or fewer passes over the data"),
    "message": ("messages between processes", "longer unrolls, or more environments per actor"),
    "iteration": (
        "one compiled program",
        "more devices, or more environments for each of its steps",
    ),
}
"""What takes time, in words, and what would help."""


@dataclass(frozen=True)
class Share:
    """A fragment, a wait or a link of a worker, with its part of the worker's time."""

    worker: str
    kind: str
    name: str
    share: float
    numbers: Mapping[str, Any]


@dataclass(frozen=True)
class Bottleneck:
    """What everything else waits for."""

    name: str
    workers: tuple[str, ...]
    share: float
    """Of their wall time."""
    busy: float
    """Share of the time that they compute."""

    def __str__(self) -> str:
        what, remedy = HELP[_sort(self.name)]
        on = f"{self.workers[0]}" if len(self.workers) == 1 else f"{len(self.workers)} workers"
        verb = "takes" if what in ("acting", "learning", "one compiled program") else "take"
        whose = "which is" if len(self.workers) == 1 else "which are"
        return (
            f"{what} {verb} {self.share:.0%} of the wall time on {on}, {whose} {self.busy:.0%} "
            f"busy; {remedy} would help."
        )


@dataclass(frozen=True)
class Analysis:
    """A run's plan and its measurements, to print or to read by a program."""

    run: Run
    plan: Plan
    measured: Mapping[str, Any]

    def shares(self) -> Iterator[Share]:
        """Everything that was measured, worker by worker."""
        for worker, of in self.measured["workers"].items():
            wall = max(of["wall_s"], 1e-9)
            for kind in (COMPUTE, WAIT, LINK):
                for name, numbers in of[kind].items():
                    yield Share(worker, kind, name, numbers["seconds"] / wall, numbers)

    def of_worker(self, worker: str) -> dict[str, float]:
        """The shares of a worker's time that it computes, waits and hands over."""
        parts: dict[str, float] = dict.fromkeys((COMPUTE, WAIT, LINK), 0.0)
        for share in self.shares():
            if share.worker == worker:
                parts[share.kind] += share.share
        return parts

    @property
    def bottleneck(self) -> Bottleneck | None:
        """The largest share of those workers that are waited for."""
        working = [name for name in self.measured["workers"] if name != DRIVER]
        if not working:
            return None
        waits = {name: self.of_worker(name)[WAIT] for name in working}
        blamed = [name for name in working if waits[name] < IDLE] or working
        sums: dict[str, list[Share]] = {}
        for share in self.shares():
            if share.worker in blamed and share.kind != WAIT:
                sums.setdefault(share.name, []).append(share)
        if not sums:
            return None
        name = max(sums, key=lambda key: max(share.share for share in sums[key]))
        top = max(sums[name], key=lambda share: share.share)
        stem = top.worker.rstrip("0123456789")
        alike = [s for s in sums[name] if s.worker.rstrip("0123456789") == stem]
        workers = tuple(share.worker for share in alike)
        busy = sum(self.of_worker(worker)[COMPUTE] for worker in workers) / len(workers)
        return Bottleneck(name, workers, sum(s.share for s in alike) / len(alike), busy)

    def __str__(self) -> str:
        lines = [f"run  {self.run.path}: {_title(self.plan)}"]
        worst = self.bottleneck
        for worker in sorted(self.measured["workers"], key=lambda name: name == DRIVER):
            parts = self.of_worker(worker)
            wall = self.measured["workers"][worker]["wall_s"]
            lines += [
                "",
                f"  {worker}  {wall:.1f} s: computes {parts[COMPUTE]:.0%}, waits "
                f"{parts[WAIT]:.0%}, hands over {parts[LINK]:.0%}",
            ]
            rows: list[Row] = [("", "", "share", "seconds", "calls", "median", "99 %", "rate")]
            for share in self.shares():
                if share.worker == worker:
                    rows.append(_row(share, wall, worst))
            lines += [f"  {line}" for line in table(rows)]
        lines += ["", *self._staleness()]
        if self.measured["dropped_spans"]:
            lines.append(f"  {self.measured['dropped_spans']:,} spans were not kept.")
        if worst is not None:
            lines.append(f"  bottleneck: {worst}")
        return "\n".join(lines).rstrip() + "\n"

    def _staleness(self) -> list[str]:
        found = {int(k): v for k, v in self.measured["staleness"].items()}
        if not found:
            return []
        total = sum(found.values())
        parts = ", ".join(f"{k}: {v / total:.0%}" for k, v in found.items())
        return [f"  staleness {parts}; the bound is {self.plan.staleness}"]

    def json(self) -> str:
        """All of it as one JSON object."""
        worst = self.bottleneck
        found = {
            "run": str(self.run.path),
            "plan": serial.to_json(self.plan),
            **self.measured,
            "bottleneck": None
            if worst is None
            else {"name": worst.name, "workers": list(worst.workers), "sentence": str(worst)},
        }
        return json.dumps(found, indent=2)


def analyze(run: str | Path | Run) -> Analysis:
    """What was measured in a run, finished or not."""
    opened = run if isinstance(run, Run) else Run.open(run)
    measured = _read(opened, FILE)
    if measured.get("format") != FORMAT:
        raise UserError(
            f"{opened.path / FILE} was written by another version of Dovetail: train again to "
            f"measure."
        )
    return Analysis(opened, serial.from_json(_read(opened, "plan.json")), measured)


def _read(run: Run, name: str) -> dict[str, Any]:
    try:
        return json.loads((run.path / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{run.path} has no {name}: nothing was measured yet, or it is of an older version of "
            f"Dovetail."
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{run.path / name} cannot be read ({error}).") from error


def _title(plan: Plan) -> str:
    return f"{plan.algorithm} on {plan.env}, {plan.policy}, {count(plan.num_envs, 'environment')}"


def _sort(name: str) -> str:
    """Which of the things in `HELP` a fragment or link is."""
    last = name.rpartition(".")[2]
    return last if last in HELP else "learn"


def _row(share: Share, wall: float, worst: Bottleneck | None) -> Row:
    numbers = share.numbers
    is_worst = worst is not None and worst.name == share.name and share.worker in worst.workers
    rate = ""
    if numbers["bytes"]:
        rate = f"{quantity(numbers['bytes'] / wall, 'B')}/s"
    elif numbers["items"]:
        rate = f"{numbers['items'] / wall:,.0f}/s"
    return (
        "▶" if is_worst else "",
        f"waits for {share.name}" if share.kind == WAIT else share.name,
        f"{share.share:.1%}",
        f"{numbers['seconds']:.2f}",
        f"{numbers['calls']:,}",
        _duration(numbers["p50"]),
        _duration(numbers["p99"]),
        rate,
    )


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
