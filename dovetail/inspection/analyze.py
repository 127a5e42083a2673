"""Where the time of a run went: its plan with what was measured, like SQL's EXPLAIN ANALYZE."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dovetail.errors import UserError
from dovetail.graph.show import Row, count, quantity, table
from dovetail.plan import serial
from dovetail.plan.ir import Plan
from dovetail.run.folder import Run
from dovetail.telemetry.spans import COMPUTE, LINK, QUEUE, ROOM, WAIT
from dovetail.telemetry.timeline import FILE, FORMAT

DRIVER, MESSAGE = "driver", "message"
IDLE = 0.2
"""A worker that waits for less than this share of the time holds the others up."""
HELP = {
    "step": (
        "environment steps",
        "more workers that step (--strategy environments or actor-learner), or a back end that is "
        "compiled (EnvPool, a JAX environment)",
    ),
    "act": (
        "acting",
        "more environments for each call of it (--num-envs, --strategy central-inference)",
    ),
    "learn": ("learning", "more devices (--strategy data-parallel), or fewer passes over the data"),
    "message": ("messages between processes", "longer unrolls, or more environments per actor"),
    "iteration": (
        "one compiled program",
        "more devices, or more environments for each of its steps",
    ),
}
"""What takes time, in words, and what would help."""


@dataclass(frozen=True)
class TimeShare:
    """A fragment, a wait or a link of a worker, with its part of the worker's time."""

    worker: str
    kind: str
    name: str
    share: float
    numbers: Mapping[str, Any]


@dataclass(frozen=True)
class Use:
    """The shares of a worker's time."""

    computes: float
    waits_in: float
    """For what others make."""
    waits_out: float
    """For room, because others have enough."""
    hands_over: float

    @property
    def waits(self) -> float:
        """Both waits."""
        return self.waits_in + self.waits_out

    @property
    def total(self) -> float:
        """All that is known of its time: near 1."""
        return self.computes + self.waits + self.hands_over

    def __str__(self) -> str:
        return (
            f"computes {self.computes:.0%}, waits for others {self.waits_in:.0%}, for room "
            f"{self.waits_out:.0%}, hands over {self.hands_over:.0%}"
        )


@dataclass(frozen=True)
class LinkUse:
    """What went over a link, all its senders together."""

    name: str
    messages_per_s: float = 0.0
    bytes_per_s: float = 0.0
    p50: float = 0.0
    """Seconds from when something was put on it to when it was taken, of the slowest taker."""
    p99: float = 0.0
    depth: float = 0.0
    """How many lay there, on average, when one was taken."""

    def plus(self, messages_per_s: float, bytes_per_s: float) -> "LinkUse":
        """With another sender."""
        messages, sent = self.messages_per_s + messages_per_s, self.bytes_per_s + bytes_per_s
        return replace(self, messages_per_s=messages, bytes_per_s=sent)

    def slower(self, numbers: Mapping[str, Any], depth: float) -> "LinkUse":
        """With another taker."""
        p50, p99 = max(self.p50, numbers["p50"]), max(self.p99, numbers["p99"])
        return replace(self, p50=p50, p99=p99, depth=max(self.depth, depth))

    def row(self) -> Row:
        """A line of the table."""
        return (
            self.name,
            f"{self.messages_per_s:,.1f}/s",
            f"{quantity(round(self.bytes_per_s), 'B')}/s" if self.bytes_per_s else "",
            _duration(self.p50) if self.p50 else "",
            _duration(self.p99) if self.p99 else "",
            f"{self.depth:.1f}" if self.depth else "",
        )


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

    def shares(self) -> Iterator[TimeShare]:
        """Everything that was measured, worker by worker."""
        for worker, of in self.measured["workers"].items():
            wall = max(of["wall_s"], 1e-9)
            for kind in (COMPUTE, WAIT, LINK):
                for name, numbers in of[kind].items():
                    yield TimeShare(worker, kind, name, numbers["seconds"] / wall, numbers)

    def of_worker(self, worker: str) -> Use:
        """What a worker's time goes into."""
        parts: dict[str, float] = dict.fromkeys((COMPUTE, WAIT, ROOM, LINK), 0.0)
        for share in self.shares():
            if share.worker == worker:
                parts[ROOM if share.name == ROOM else share.kind] += share.share
        return Use(parts[COMPUTE], parts[WAIT], parts[ROOM], parts[LINK])

    def links(self) -> list[LinkUse]:
        """What went over each link between workers, in the order in which they were first used."""
        found: dict[str, LinkUse] = {}
        for share in self.shares():
            if share.kind == LINK:
                wall = max(self.measured["workers"][share.worker]["wall_s"], 1e-9)
                more = share.numbers["calls"] / wall, share.numbers["bytes"] / wall
                known = found.get(share.name, LinkUse(share.name))
                found[share.name] = known.plus(*more)
                if share.name == MESSAGE:
                    found[share.name] = found[share.name].slower(share.numbers, 0.0)
        for of in self.measured["workers"].values():
            for name, numbers in of[QUEUE].items():
                depth = numbers["items"] / max(numbers["calls"], 1)
                found[name] = found.get(name, LinkUse(name)).slower(numbers, depth)
        return list(found.values())

    @property
    def critical(self) -> tuple[str, ...]:
        """The workers on the critical path: those that hardly wait; where all wait for each other,
        of those that are alike the one that waits least."""
        working = [name for name in self.measured["workers"] if name != DRIVER]
        waits = {name: self.of_worker(name).waits for name in working}
        if busy := [name for name in working if waits[name] < IDLE]:
            return tuple(busy)
        least: dict[str, str] = {}
        for name in sorted(working, key=lambda name: waits[name]):
            least.setdefault(_stem(name), name)
        return tuple(name for name in working if name in least.values())

    @property
    def critical_path(self) -> list[TimeShare]:
        """What the workers on it do, of that which takes a hundredth of their time."""
        on = self.critical
        rows = (share for share in self.shares() if share.kind != WAIT)
        return [share for share in rows if share.worker in on and share.share >= 0.01]

    @property
    def bottleneck(self) -> Bottleneck | None:
        """The largest share of those workers that are waited for."""
        blamed = self.critical
        sums: dict[str, list[TimeShare]] = {}
        for share in self.shares():
            if share.worker in blamed and share.kind != WAIT:
                sums.setdefault(share.name, []).append(share)
        if not sums:
            return None
        name = max(sums, key=lambda key: max(share.share for share in sums[key]))
        top = max(sums[name], key=lambda share: share.share)
        alike = [s for s in sums[name] if _stem(s.worker) == _stem(top.worker)]
        workers = tuple(share.worker for share in alike)
        busy = sum(self.of_worker(worker).computes for worker in workers) / len(workers)
        return Bottleneck(name, workers, sum(s.share for s in alike) / len(alike), busy)

    def __str__(self) -> str:
        lines = [f"run  {self.run.path}: {_title(self.plan)}"]
        worst, path = self.bottleneck, self.critical_path
        for worker in sorted(self.measured["workers"], key=lambda name: name == DRIVER):
            wall = self.measured["workers"][worker]["wall_s"]
            lines += ["", f"  {worker}  {wall:.1f} s: {self.of_worker(worker)}"]
            rows: list[Row] = [("", "", "share", "seconds", "calls", "median", "99 %", "rate")]
            for share in self.shares():
                if share.worker == worker:
                    rows.append(_row(share, wall, _mark(share, worst, path)))
            lines += [f"  {line}" for line in table(rows)]
        lines += ["", *self._link_lines(), *self._staleness()]
        if self.measured["dropped_spans"]:
            lines.append(f"  {self.measured['dropped_spans']:,} spans were not kept.")
        if path:
            lines.append(f"  critical path: {_path_text(path)}")
        if worst is not None:
            lines.append(f"  bottleneck: {worst}")
        return "\n".join(lines).rstrip() + "\n"

    def _link_lines(self) -> list[str]:
        rows: list[Row] = [("link", "messages", "bytes", "median", "99 %", "depth")]
        rows += [link.row() for link in self.links()]
        return [*table(rows), ""] if len(rows) > 1 else []

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
            "use": {name: asdict(self.of_worker(name)) for name in self.measured["workers"]},
            "links": [asdict(link) for link in self.links()],
            "critical_path": [{"worker": s.worker, "name": s.name} for s in self.critical_path],
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
    if not isinstance(measured.get("workers"), dict):
        raise UserError(f"{opened.path / FILE} cannot be read: it names no workers.")
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
    return f"{plan.algorithm} on {plan.env}, {plan.strategy}, {count(plan.num_envs, 'environment')}"


def _sort(name: str) -> str:
    """Which of the things in `HELP` a fragment or link is."""
    last = name.rpartition(".")[2]
    return last if last in HELP else "learn"


def _stem(worker: str) -> str:
    """What workers that are alike have in common: `actor-` of actor-3."""
    return worker.rstrip("0123456789")


def _mark(share: TimeShare, worst: Bottleneck | None, path: list[TimeShare]) -> str:
    if worst is not None and worst.name == share.name and share.worker in worst.workers:
        return "▶"
    return "•" if share in path else ""


def _path_text(path: list[TimeShare]) -> str:
    """Of workers that are alike, one stands for all."""
    shown: dict[str, list[str]] = {}
    for share in path:
        first = next((w for w in shown if _stem(w) == _stem(share.worker)), share.worker)
        if first == share.worker:
            shown.setdefault(first, []).append(f"{share.name} {share.share:.0%}")
    return "; ".join(f"{worker}: {' → '.join(parts)}" for worker, parts in shown.items())


def _row(share: TimeShare, wall: float, mark: str) -> Row:
    numbers = share.numbers
    rate = ""
    if numbers["bytes"]:
        rate = f"{quantity(numbers['bytes'] / wall, 'B')}/s"
    elif numbers["items"]:
        rate = f"{numbers['items'] / wall:,.0f}/s"
    return (
        mark,
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
