"""A run's metrics for Prometheus at http://host:port/metrics, with equal names in all strategies.

The loop publishes immutable copies of its counters to a separate process that only serves them
(`exporting.py`). A scrape reads the latest copy, so that training never waits for it. The number of
lines of an answer is bounded, however many workers and metrics there are.
"""

import errno
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dovetail.errors import UserError
from dovetail.telemetry.spans import LINK, QUEUE
from dovetail.telemetry.timeline import FIRST_BUCKET, PER_OCTAVE, Timeline

LABEL_SETS = 512
"""Maximum number of (worker, kind, name) labels; later ones are summed under `OTHER`."""
LATENCIES = 64
"""Maximum number of latency histograms by (kind, name); later ones are summed under `OTHER`."""
METRICS = 128
"""Maximum number of an algorithm's metrics."""
NODES = 256
"""Maximum number of node names; later ones become `OTHER`."""
LONGEST = 200
"""Maximum number of characters in a label."""
OTHER = "other"
BOUNDS = range(24, 128, 8)
"""The timeline buckets that bound ours, which span two octaves each, from 6.4 µs to 107 s."""
VERSIONS = 16
"""Staleness below this has a bucket per version; the rest shares one."""
LINGER = 10.0
"""Seconds that a diverged run waits for a scrape, if it has been scraped before."""

COUNTERS = {
    "env_steps": ("env_steps", "Environment steps learned from, earlier starts included."),
    "updates": ("updates", "Updates of the learner, earlier starts included."),
    "episodes": ("episodes", "Episodes that ended in this start of the run."),
    "restarts": ("restarts", "How often workers were set up again after they failed or hung."),
    "dropped": ("dropped_trajectories", "Trajectories that came too late to be learned from."),
    "lost_unrolls": ("lost_unrolls", "Unrolls of other processes that never came."),
}
GAUGES = {
    "time_s": ("run_seconds", "Wall time of the run, earlier starts included."),
    "steps_per_s": ("steps_per_second", "Environment steps per second over the last reports."),
    "episode_return": ("episode_return", "Mean return of the last 100 episodes."),
    "episode_length": ("episode_length", "Mean length of the last 100 episodes, in steps."),
    "eval_return": ("evaluation_return", "Mean return of the last greedy evaluation."),
    "staleness_max": ("staleness_max", "Greatest staleness of late, in versions."),
}
"""Scalars of the loop with a dedicated metric: its name and help."""

ZERO = ("episodes", "restarts", "dropped", "lost_unrolls", "staleness_max")
"""Scalars that are 0 unless measured; others are omitted until they are known."""
ELSEWHERE = re.compile(r"staleness|share_.*")
"""Scalars that other metrics cover: the histogram of staleness, and the seconds."""

Key = tuple[str, str, str]
"""Worker, kind and name."""


class PublishedTotals(NamedTuple):
    """The values of a `Totals` at the time of publication."""

    calls: int
    seconds: float
    nbytes: int
    items: int
    buckets: Mapping[int, int]

    def plus(self, more: "PublishedTotals") -> "PublishedTotals":
        """The sum of both, without the histogram of durations."""
        calls, seconds = self.calls + more.calls, self.seconds + more.seconds
        return PublishedTotals(
            calls, seconds, self.nbytes + more.nbytes, self.items + more.items, {}
        )


@dataclass(frozen=True)
class Published:
    """The immutable content of a scrape."""

    scalars: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(ZERO, 0.0))
    totals: Mapping[Key, PublishedTotals] = field(default_factory=dict[Key, PublishedTotals])
    staleness: Mapping[int, int] = field(default_factory=dict[int, int])
    dropped_spans: int = 0
    reported: float = field(default_factory=time.time)
    """Time of the last report, in seconds since the epoch."""
    up: bool = True
    diverged: bool = False

    def after(self, row: Mapping[str, float], timeline: Timeline) -> "Published":
        """The content after another report: its scalars, and the totals of all spans so far."""
        episodes = self.scalars["episodes"] + row.get("episodes", 0.0)
        return Published(
            scalars={**self.scalars, **row, "episodes": episodes},
            totals={
                key: PublishedTotals(t.calls, t.seconds, t.nbytes, t.items, dict(t.buckets))
                for key, t in timeline.totals.items()
            },
            staleness=dict(timeline.staleness),
            dropped_spans=timeline.dropped,
        )


class PortTaken(UserError):
    """Another program listens on the port."""


class Exporter(Collector):
    """Serves the metrics of a run until closed."""

    def __init__(
        self,
        host: str,
        port: int,
        info: Mapping[str, str],
        bound: int,
        nodes: Mapping[str, str] | None = None,
    ) -> None:
        """`port` 0 takes any free port; `bound` is the plan's staleness bound; `nodes` maps workers
        to their nodes on a cluster."""
        self._info, self._bound = {name: _label(text) for name, text in info.items()}, bound
        self._nodes = bounded_nodes(nodes or {})
        self._published = Published()
        self._scraped, self._seen = False, threading.Event()
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(
                    f"--metrics-port {port} is taken on {host}: give another, or 0 for a free one."
                ) from error
            raise UserError(
                f"Metrics cannot be served on {host}, port {port} ({error.strerror}): give another "
                f"--metrics-host or --metrics-port."
            ) from error
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self._server.server_port}/metrics"

    def publish(self, row: Mapping[str, float], timeline: Timeline) -> None:
        """Publishes the scalars of a report and the totals of all spans so far."""
        self.show(self._published.after(row, timeline))

    def show(self, published: Published) -> None:
        """Sets the content of later scrapes."""
        self._published = published

    def linger(self) -> None:
        """Waits, up to `LINGER` seconds, until a scrape has seen the divergence, if any scrape."""
        if self._scraped:
            self._seen.wait(LINGER)

    def close(self) -> None:
        """Stops serving; safe to call twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Metric]:
        """The current metrics; called from the server's threads."""
        now, self._scraped = self._published, True  # `show` may replace it during the scrape
        yield InfoMetricFamily("dovetail_run", "What is trained, and how.", self._info)
        yield _gauge("staleness_bound", "The most versions that the plan allows.", self._bound)
        yield from _scalars(now)
        yield from _spans(bounded(now.totals), self._nodes)
        yield _latency(now.totals)
        yield _staleness(now.staleness)
        if now.diverged:  # after the last metric, when the scrape has everything
            self._seen.set()


def bounded(totals: Mapping[Key, PublishedTotals]) -> dict[Key, PublishedTotals]:
    """Keeps the first `LABEL_SETS` totals and sums the rest of each kind."""
    # The first ones, not the largest: a series must not move to `other` between two scrapes.
    found = dict(islice(totals.items(), LABEL_SETS))
    for (_, kind, _), more in islice(totals.items(), LABEL_SETS, None):
        key = OTHER, kind, OTHER
        found[key] = found[key].plus(more) if key in found else more
    return found


def bounded_nodes(nodes: Mapping[str, str]) -> dict[str, str]:
    """The node of each worker; nodes beyond the first `NODES` become `OTHER`."""
    known = set(islice(dict.fromkeys(nodes.values()), NODES))
    return {worker: node if node in known else OTHER for worker, node in nodes.items()}


def _label(text: str) -> str:
    """Shortens a label; the client library escapes it."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def metric_names(scalars: Mapping[str, float]) -> dict[str, float]:
    """An algorithm's metrics with names of letters, digits and _; means over seeds first."""
    found: dict[str, float] = {}
    # A slash separates a metric from its seed; if there is no room for all, the means stay.
    for name in sorted(scalars, key=lambda name: "/" in name):
        if name in COUNTERS or name in GAUGES or ELSEWHERE.fullmatch(name):
            continue
        plain = _label(re.sub(r"[^a-zA-Z0-9_]", "_", name))
        if plain not in found and len(found) < METRICS:
            found[plain] = scalars[name]
    return found


def _gauge(name: str, text: str, value: float | None) -> Metric:
    return GaugeMetricFamily(f"dovetail_{name}", text, value)


def _scalars(now: Published) -> Iterator[Metric]:
    """Counters and gauges of the loop, and the algorithm's metrics."""
    for scalar, (name, text) in COUNTERS.items():
        yield CounterMetricFamily(f"dovetail_{name}", text, now.scalars.get(scalar))
    for scalar, (name, text) in GAUGES.items():
        yield _gauge(name, text, now.scalars.get(scalar))
    metrics = GaugeMetricFamily("dovetail_metric", "A metric of the algorithm.", labels=["name"])
    for name, value in metric_names(now.scalars).items():
        metrics.add_metric([name], value)
    yield metrics
    odd = sum(not math.isfinite(value) for value in now.scalars.values()) + now.diverged
    yield _gauge("nonfinite_metrics", "Metrics that are NaN or infinite.", odd)
    yield _gauge("up", "1 while it trains, 0 once it has ended or diverged.", now.up)
    text = "When the last report came, or the run began, in seconds since 1970."
    yield _gauge("last_report_timestamp_seconds", text, now.reported)
    text = "Spans that a full buffer forgot; the totals lack them."
    yield CounterMetricFamily("dovetail_dropped_spans", text, now.dropped_spans)


def _spans(totals: Mapping[Key, PublishedTotals], nodes: Mapping[str, str]) -> Iterator[Metric]:
    """The counters of all spans. `node` may be empty: Prometheus treats that as no label."""
    labels = ["worker", "kind", "name", "node"]
    text = "Seconds that a worker spent: computing a fragment, waiting, or using a link."
    seconds = CounterMetricFamily("dovetail_seconds", text, labels=labels)
    calls = CounterMetricFamily("dovetail_calls", "How often it did so.", labels=labels)
    text = "Environment steps, or messages, that it handled; of a queue, how many lay there."
    items = CounterMetricFamily("dovetail_items", text, labels=labels)
    text = "Bytes that a worker put on a link."
    nbytes = CounterMetricFamily("dovetail_bytes", text, labels=["worker", "name", "node"])
    for (worker, kind, name), sums in totals.items():
        told = [_label(worker), kind, _label(name), _label(nodes.get(worker, ""))]
        if kind != QUEUE:  # time in a queue is not the worker's time
            seconds.add_metric(told, sums.seconds)
        calls.add_metric(told, sums.calls)
        items.add_metric(told, sums.items)
        if kind == LINK:
            nbytes.add_metric([told[0], *told[2:]], sums.nbytes)
    yield from (seconds, calls, items, nbytes)


def _latency(totals: Mapping[Key, PublishedTotals]) -> Metric:
    """The histogram of durations by kind and name, over all workers."""
    buckets: dict[tuple[str, str], Counter[int]] = {}
    seconds: dict[tuple[str, str], float] = {}
    for (_, kind, name), sums in totals.items():
        key = kind, name
        if key not in buckets and len(buckets) >= LATENCIES:
            key = kind, OTHER
        buckets.setdefault(key, Counter()).update(sums.buckets)
        seconds[key] = seconds.get(key, 0.0) + sums.seconds
    text = "How long one call took, over all workers."
    family = HistogramMetricFamily("dovetail_latency_seconds", text, labels=["kind", "name"])
    for key, counts in buckets.items():
        rows = [
            (
                str(FIRST_BUCKET * 2 ** (bound / PER_OCTAVE)),
                # Prometheus' buckets are cumulative.
                float(sum(n for bucket, n in counts.items() if bucket < bound)),
            )
            for bound in BOUNDS
        ]
        family.add_metric(
            [key[0], _label(key[1])], [*rows, ("+Inf", float(counts.total()))], seconds[key]
        )
    return family


def _staleness(counts: Mapping[int, int]) -> Metric:
    """The histogram of staleness, with cumulative buckets."""
    text = "Versions that the trajectories learned from were behind."
    rows = [
        (str(version), float(sum(n for behind, n in counts.items() if behind <= version)))
        for version in range(VERSIONS)
    ]
    rows.append(("+Inf", float(sum(counts.values()))))
    total = float(sum(behind * n for behind, n in counts.items()))
    return HistogramMetricFamily("dovetail_staleness", text, rows, total)
