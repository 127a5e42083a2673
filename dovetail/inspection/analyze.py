"""`analyze`: a run's plan with its measurements, like SQL's EXPLAIN ANALYZE."""

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
"""A worker that waits for less than this share of its time is on the critical path."""
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
"""For each kind of work: its name and a remedy."""


@dataclass(frozen=True)
class TimeShare:
    """A fragment, wait or link of a worker, with its share of the worker's time."""

    worker: str
    kind: str
    name: str
    share: float
    numbers: Mapping[str, Any]


@dataclass(frozen=True)
class Use:
    """The shares of a worker's time, from 0 to 1."""

    computes: float
    waits_in: float
    """Waiting for input from other workers."""
    waits_out: float
    """Waiting for room in an output channel."""
    hands_over: float
    """Transferring data over links."""

    @property
    def waits(self) -> float:
        """Waiting for input or for room."""
        return self.waits_in + self.waits_out

    @property
    def total(self) -> float:
        """The sum of all shares; close to 1."""
        return self.computes + self.waits + self.hands_over

    def __str__(self) -> str:
        return (
            f"computes {self.computes:.0%}, waits for others {self.waits_in:.0%}, for room "
            f"{self.waits_out:.0%}, hands over {self.hands_over:.0%}"
        )


@dataclass(frozen=True)
class LinkUse:
    """The traffic of a link, summed over its senders."""

    name: str
    messages_per_s: float = 0.0
    bytes_per_s: float = 0.0
    p50: float = 0.0
    """Seconds from put to take, median, of the slowest receiver."""
    p99: float = 0.0
    depth: float = 0.0
    """Mean number of messages in the channel at a take."""

    def plus(self, messages_per_s: float, bytes_per_s: float) -> "LinkUse":
        """Adds the traffic of another sender."""
        messages, sent = self.messages_per_s + messages_per_s, self.bytes_per_s + bytes_per_s
        return replace(self, messages_per_s=messages, bytes_per_s=sent)

    def slower(self, numbers: Mapping[str, Any], depth: float) -> "LinkUse":
        """Includes another receiver; keeps the slowest."""
        p50, p99 = max(self.p50, numbers["p50"]), max(self.p99, numbers["p99"])
        return replace(self, p50=p50, p99=p99, depth=max(self.depth, depth))

    def row(self) -> Row:
        """The link's row in the printed table."""
        return (
            self.name,
            f"{self.messages_per_s:,.1f}/s",
            f"{quantity(self.bytes_per_s, 'B')}/s" if self.bytes_per_s else "",
            _duration(self.p50) if self.p50 else "",
            _duration(self.p99) if self.p99 else "",
            f"{self.depth:.1f}" if self.depth else "",
        )


@dataclass(frozen=True)
class Bottleneck:
    """The fragment or link that all other workers wait for."""

    name: str
    workers: tuple[str, ...]
    share: float
    """Its share of the workers' wall time."""
    busy: float
    """The share of the time that these workers compute."""

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
    """A run's plan and its measurements, as text or JSON."""

    run: Run
    plan: Plan
    measured: Mapping[str, Any]

    def shares(self) -> Iterator[TimeShare]:
        """All measured shares, worker by worker."""
        for worker, of in self.measured["workers"].items():
            wall = max(of["wall_s"], 1e-9)
            for kind in (COMPUTE, WAIT, LINK):
                for name, numbers in of[kind].items():
                    yield TimeShare(worker, kind, name, numbers["seconds"] / wall, numbers)

    def of_worker(self, worker: str) -> Use:
        """The shares of one worker's time."""
        parts: dict[str, float] = dict.fromkeys((COMPUTE, WAIT, ROOM, LINK), 0.0)
        for share in self.shares():
            if share.worker == worker:
                parts[ROOM if share.name == ROOM else share.kind] += share.share
        return Use(parts[COMPUTE], parts[WAIT], parts[ROOM], parts[LINK])

    def links(self) -> list[LinkUse]:
        """The traffic of each link between workers, in order of first use."""
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
        """The workers on the critical path: those that hardly wait.

        If all workers wait for each other: of each group of similar workers, the one that waits
        least.
        """
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
        """The work of the workers on the critical path, without shares below 1 %."""
        on = self.critical
        rows = (share for share in self.shares() if share.kind != WAIT)
        return [share for share in rows if share.worker in on and share.share >= 0.01]

    @property
    def bottleneck(self) -> Bottleneck | None:
        """The largest share among the workers on the critical path; None without measurements."""
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
        """The plan, measurements and conclusions as one JSON object."""
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
    """Reads the measurements of a run, finished or not."""
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
    """The kind of work in `HELP` to which a fragment or link belongs."""
    last = name.rpartition(".")[2]
    return last if last in HELP else "learn"


def _stem(worker: str) -> str:
    """The common name of similar workers: `actor-` for actor-3."""
    return worker.rstrip("0123456789")


def _mark(share: TimeShare, worst: Bottleneck | None, path: list[TimeShare]) -> str:
    if worst is not None and worst.name == share.name and share.worker in worst.workers:
        return "▶"
    return "•" if share in path else ""


def _path_text(path: list[TimeShare]) -> str:
    """The critical path in words; one worker stands for all similar ones."""
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
