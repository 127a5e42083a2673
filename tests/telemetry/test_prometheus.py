"""What Prometheus reads of a run: names, bounds, ports; and that scraping disturbs nobody."""

import dataclasses
import json
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from small import LENGTH, QUIET, a2c, stop_after

import dovetail
from dovetail.algorithm import RL
from dovetail.algorithms import A2C, IMPALA
from dovetail.errors import UserError
from dovetail.run.folder import Run
from dovetail.strategies import ActorLearner, Fused, Local
from dovetail.telemetry import prometheus
from dovetail.telemetry.exporting import ExporterProcess
from dovetail.telemetry.prometheus import Exporter, PortTaken, Published
from dovetail.telemetry.spans import COMPUTE, LINK, QUEUE, WAIT, Span
from dovetail.telemetry.timeline import Timeline

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
INFO = {"algorithm": "ppo", "env": "gymnasium:CartPole-v1", "strategy": "local", "seed": "0"}
KINDS = {
    "dovetail_run": "gauge",  # run_info
    "dovetail_up": "gauge",
    "dovetail_last_report_timestamp_seconds": "gauge",
    "dovetail_run_seconds": "gauge",
    "dovetail_env_steps": "counter",
    "dovetail_updates": "counter",
    "dovetail_episodes": "counter",
    "dovetail_steps_per_second": "gauge",
    "dovetail_episode_return": "gauge",
    "dovetail_episode_length": "gauge",
    "dovetail_evaluation_return": "gauge",
    "dovetail_metric": "gauge",
    "dovetail_nonfinite_metrics": "gauge",
    "dovetail_seconds": "counter",
    "dovetail_calls": "counter",
    "dovetail_items": "counter",
    "dovetail_bytes": "counter",
    "dovetail_latency_seconds": "histogram",
    "dovetail_staleness": "histogram",
    "dovetail_staleness_max": "gauge",
    "dovetail_staleness_bound": "gauge",
    "dovetail_restarts": "counter",
    "dovetail_lost_unrolls": "counter",
    "dovetail_dropped_trajectories": "counter",
    "dovetail_dropped_spans": "counter",
}
"""Families as the parser names them: counters without _total."""


@contextmanager
def serving(info: dict[str, str] = INFO, bound: int = 2) -> Generator[Exporter]:
    exporter = Exporter(HOST, 0, info, bound)
    try:
        yield exporter
    finally:
        exporter.close()


def scrape(exporter: Exporter | ExporterProcess) -> dict[str, Metric]:
    """The families, by name."""
    with urllib.request.urlopen(exporter.url) as answer:
        text = answer.read().decode()
    return {f.name.removesuffix("_info"): f for f in text_string_to_metric_families(text)}


def samples(families: dict[str, Metric]) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels, in the order of the labels' names; an
    empty one is none."""
    found: dict[tuple[str, ...], float] = {}
    for family in families.values():
        for sample in family.samples:
            labels = (value for _, value in sorted(sample.labels.items()) if value)
            key = sample.name, *labels
            assert key not in found
            found[key] = sample.value
    return found


def timeline(*spans: tuple[str, Span]) -> Timeline:
    made = Timeline()
    for worker, span in spans:
        made.add({worker: [span]})
    return made


# What is told.


def test_every_metric_is_there_from_the_start_with_its_help() -> None:
    with serving() as exporter:
        found = scrape(exporter)
    assert {name: family.type for name, family in found.items()} == KINDS
    assert all(family.documentation.endswith(".") for family in found.values())
    told = samples(found)
    assert told["dovetail_run_info", "ppo", "gymnasium:CartPole-v1", "0", "local"] == 1
    assert told["dovetail_up",] == 1
    assert told["dovetail_restarts_total",] == 0
    assert told["dovetail_staleness_bound",] == 2
    assert ("dovetail_episode_return",) not in told
    assert abs(told["dovetail_last_report_timestamp_seconds",] - time.time()) < 600


def test_scalars_keep_their_last_value_and_episodes_are_summed() -> None:
    with serving() as exporter:
        row = {"env_steps": 64.0, "updates": 2.0, "episode_return": 20.0, "episodes": 3.0}
        exporter.publish(row | {"loss": 0.5, "share_learn": 0.3, "restarts": 1.0}, timeline())
        exporter.publish({"env_steps": 96.0, "updates": 3.0, "episodes": 2.0}, timeline())
        told = samples(scrape(exporter))
    assert told["dovetail_env_steps_total",] == 96
    assert told["dovetail_updates_total",] == 3
    assert told["dovetail_episodes_total",] == 5
    assert told["dovetail_episode_return",] == 20
    assert told["dovetail_restarts_total",] == 1
    assert {key[1]: v for key, v in told.items() if key[0] == "dovetail_metric"} == {"loss": 0.5}


def test_spans_are_summed_by_worker_kind_and_name() -> None:
    spans = timeline(
        ("learner", Span(COMPUTE, "learn", 0.0, 0.5, items=8)),
        ("learner", Span(COMPUTE, "learn", 1.0, 0.25, items=8)),
        ("actor-0", Span(WAIT, "weights", 0.0, 2.0)),
        ("actor-0", Span(LINK, "gather", 2.0, 0.001, nbytes=4096, items=1)),
    )
    spans.dropped = 7
    with serving() as exporter:
        exporter.publish({}, spans)
        told = samples(scrape(exporter))
    assert told["dovetail_seconds_total", "compute", "learn", "learner"] == 0.75
    assert told["dovetail_calls_total", "compute", "learn", "learner"] == 2
    assert told["dovetail_items_total", "compute", "learn", "learner"] == 16
    assert told["dovetail_seconds_total", "wait", "weights", "actor-0"] == 2
    nbytes = {key[1:]: v for key, v in told.items() if key[0] == "dovetail_bytes_total"}
    assert nbytes == {("gather", "actor-0"): 4096}
    assert told["dovetail_dropped_spans_total",] == 7


def test_latencies_are_a_histogram_over_all_workers() -> None:
    spans = timeline(
        ("actor-0", Span(COMPUTE, "act", 0.0, 0.003, calls=3)),  # 1 ms each
        ("actor-1", Span(COMPUTE, "act", 0.0, 2.0)),
    )
    with serving() as exporter:
        exporter.publish({}, spans)
        family = scrape(exporter)["dovetail_latency_seconds"]
    below = {float(s.labels["le"]): s.value for s in family.samples if s.name.endswith("_bucket")}
    assert [below[le] for le in sorted(below)] == [0, 0, 0, 0, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4]
    assert sorted(below)[4] == pytest.approx(1.6384e-3)
    assert sorted(below)[9] == pytest.approx(1.67772)
    assert {s.value for s in family.samples if s.name.endswith("_sum")} == {2.003}


def test_staleness_is_counted_by_version() -> None:
    spans = [Span(QUEUE, "gather", 0.0, 0.0, staleness=behind) for behind in (0, 1, 1, 2, 40)]
    with serving() as exporter:
        exporter.publish({"staleness_max": 40.0}, timeline(*(("learner", s) for s in spans)))
        told = samples(scrape(exporter))
    below = [told["dovetail_staleness_bucket", str(version)] for version in (0, 1, 2, 15)]
    assert below == [1, 3, 4, 4]
    assert told["dovetail_staleness_bucket", "+Inf"] == 5
    assert told["dovetail_staleness_sum",] == 44
    assert told["dovetail_staleness_max",] == 40


# Bounds, and what users write.


def test_labels_are_bounded_and_nothing_is_lost() -> None:
    spans = timeline(
        *((f"actor-{i}", Span(COMPUTE, f"name-{i}", 0.0, 1.0, items=2)) for i in range(600)),
        *((f"actor-{i}", Span(LINK, "gather", 0.0, 1.0, nbytes=3)) for i in range(10)),
    )
    with serving() as exporter:
        exporter.publish({f"metric_{i}": 1.0 for i in range(300)}, spans)
        found = scrape(exporter)
    told = samples(found)
    assert len(found["dovetail_seconds"].samples) == prometheus.LABEL_SETS + 2
    assert told["dovetail_seconds_total", "compute", "other", "other"] == 600 - 512
    assert told["dovetail_items_total", "compute", "other", "other"] == 2 * (600 - 512)
    assert told["dovetail_bytes_total", "other", "other"] == 30
    assert len(found["dovetail_metric"].samples) == prometheus.METRICS
    counts = [v for key, v in told.items() if key[0] == "dovetail_latency_seconds_count"]
    assert len(counts) == prometheus.LATENCIES + 2 and sum(counts) == 610


def test_a_run_with_many_seeds_tells_the_means_first() -> None:
    row = {f"loss/seed{i}": 0.0 for i in range(200)} | {"loss": 1.0}
    names = prometheus.metric_names(row)
    assert names["loss"] == 1 and "loss_seed126" in names and len(names) == 128


def test_what_users_write_is_escaped() -> None:
    odd = 'say "hi"\\\nto café {x}'
    spans = timeline((odd, Span(COMPUTE, odd, 0.0, 1.0)))
    with serving(INFO | {"env": odd}) as exporter:
        exporter.publish({odd: 1.0, "my metric": 2.0, "my-metric": 3.0}, spans)
        told = samples(scrape(exporter))
    assert told["dovetail_run_info", "ppo", odd, "0", "local"] == 1
    assert told["dovetail_seconds_total", "compute", odd, odd] == 1
    assert told["dovetail_metric", "say__hi___to_caf___x_"] == 1
    assert told["dovetail_metric", "my_metric"] == 2


def test_labels_are_not_too_long() -> None:
    spans = timeline(("w" * 1000, Span(COMPUTE, "n" * 1000, 0.0, 1.0)))
    with serving(INFO | {"env": "e" * 1000}) as exporter:
        exporter.publish({"m" * 1000: 1.0}, spans)
        found = scrape(exporter)
    labels = [v for f in found.values() for s in f.samples for v in s.labels.values()]
    assert max(map(len, labels)) == prometheus.LONGEST


def test_workers_on_a_cluster_have_a_node_and_nodes_are_bounded() -> None:
    spans = timeline(
        ("learner", Span(COMPUTE, "learner", 0.0, 1.0)),
        ("actor-0", Span(LINK, "gather", 0.0, 2.0, nbytes=3)),
        ("driver", Span(COMPUTE, "reports", 0.0, 4.0)),
    )
    exporter = Exporter(HOST, 0, INFO, 0, {"learner": "head", "actor-0": "node-1"})
    try:
        exporter.publish({}, spans)
        told = samples(scrape(exporter))
    finally:
        exporter.close()
    assert told["dovetail_seconds_total", "compute", "learner", "head", "learner"] == 1
    assert told["dovetail_bytes_total", "gather", "node-1", "actor-0"] == 3
    assert told["dovetail_seconds_total", "compute", "reports", "driver"] == 4
    many = prometheus.bounded_nodes({f"actor-{i}": f"node-{i}" for i in range(1000)})
    assert len(set(many.values())) == prometheus.NODES + 1 and many["actor-999"] == "other"


# The server.


def test_a_taken_port_is_a_sentence_and_0_is_any_free_one() -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=f"--metrics-port {port} is taken on 127.0.0.1: give"):
            Exporter(HOST, port, INFO, 0)
        with serving() as one, serving() as two:
            assert one.url != two.url
            assert samples(scrape(one))["dovetail_up",] == 1


def test_an_address_of_another_machine_is_a_sentence() -> None:
    with pytest.raises(UserError, match=r"cannot be served on 203.0.113.1, port 0 \(.+\): give"):
        Exporter("203.0.113.1", 0, INFO, 0)


@pytest.mark.parametrize("port", [-1, 65536])
def test_no_port_is_a_sentence(port: int) -> None:
    with pytest.raises(UserError, match=f"--metrics-port is {port}: give a port from 1 to 65535"):
        dovetail.Settings(metrics_port=port)


def test_scrapes_and_publishing_go_on_beside_each_other() -> None:
    spans = timeline(
        *(
            (f"actor-{i}", Span(kind, f"name-{j}", 0.0, 0.1 * j, nbytes=5))
            for i in range(64)
            for kind in (COMPUTE, WAIT, LINK)
            for j in range(2)
        )
    )
    stopping = threading.Event()
    with serving() as exporter:

        def publish() -> None:
            step = 0.0
            while not stopping.is_set():
                step += 1
                spans.add({f"late-{step:g}": [Span(COMPUTE, "act", 0.0, 0.1)]} if step < 9 else {})
                exporter.publish({"env_steps": step}, spans)

        publisher = threading.Thread(target=publish)
        publisher.start()
        try:
            seconds, steps = [], []
            for _ in range(10):
                began = time.perf_counter()
                steps.append(samples(scrape(exporter)).get(("dovetail_env_steps_total",), 0.0))
                seconds.append(time.perf_counter() - began)
        finally:
            stopping.set()
            publisher.join()
    assert steps == sorted(steps) and steps[-1] > 0
    assert min(seconds) < 0.5


def test_who_scrapes_sees_that_it_diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "LINGER", 60.0)
    with serving() as exporter:
        exporter.publish({"loss": float("inf")}, timeline())
        assert samples(scrape(exporter))["dovetail_nonfinite_metrics",] == 1
        exporter.show(diverged(exporter))
        ending = threading.Thread(target=exporter.linger)
        ending.start()
        told: dict[tuple[str, ...], float] = {}
        while ending.is_alive():
            told = samples(scrape(exporter))
            ending.join(0.05)
        assert told["dovetail_nonfinite_metrics",] == 2 and told["dovetail_up",] == 0


def diverged(exporter: Exporter) -> Published:
    return dataclasses.replace(exporter._published, up=False, diverged=True)


def test_nobody_waits_for_scrapes_that_there_never_were() -> None:
    with serving() as exporter:
        exporter.show(diverged(exporter))
        exporter.linger()
        assert not exporter._seen.is_set()
        assert samples(scrape(exporter))["dovetail_nonfinite_metrics",] == 1


# Trainings.


@pytest.fixture
def last(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Metric]]:
    """What a scrape finds when a training's last report was published."""
    found: list[dict[str, Metric]] = []
    ended = ExporterProcess.ended

    def scrape_and_end(self: ExporterProcess) -> None:
        found.append(scrape_when(self, self._published.scalars["env_steps"]))
        ended(self)

    monkeypatch.setattr(ExporterProcess, "ended", scrape_and_end)
    return found


def scrape_when(exporter: ExporterProcess, steps: float) -> dict[str, Metric]:
    """What a scrape finds once so many steps were told, which takes a second at most."""
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        found = scrape(exporter)
        if samples(found).get(("dovetail_env_steps_total",)) == steps:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{steps} steps were not told")


TRAININGS: dict[str, tuple[Any, str, Any]] = {
    "fused": (a2c(num_envs=4), "dovetail:Chain-v0", Fused()),
    "local": (a2c(num_envs=4), "CartPole-v1", Local()),
    "actor-learner": (
        IMPALA(unroll_length=LENGTH, num_envs=4, hidden_sizes=(8,)),
        "CartPole-v1",
        ActorLearner(processes=False),
    ),
}


@pytest.mark.parametrize("strategy", TRAININGS)
def test_names_are_the_same_under_every_strategy(
    strategy: str, last: list[dict[str, Metric]], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = dataclasses.replace(QUIET, metrics_port=0, display="plain")
    algorithm, env, chosen = TRAININGS[strategy]
    run = dovetail.train(algorithm, env, chosen, total_steps=960, seed=3, settings=settings)
    assert {name: family.type for name, family in last[0].items()} == KINDS
    told = samples(last[0])
    assert told["dovetail_env_steps_total",] == run.summary["env_steps"]
    assert told["dovetail_updates_total",] == run.summary["updates"]
    assert told["dovetail_up",] == 1
    assert told["dovetail_staleness_max",] <= told["dovetail_staleness_bound",]
    assert ("dovetail_metric", "loss") in told
    info = last[0]["dovetail_run"].samples[0].labels
    assert info["strategy"] == strategy and info["seed"] == "3" and info["env"].endswith(env)
    spent = {key[1:3] for key, v in told.items() if key[0] == "dovetail_seconds_total" and v > 0}
    assert {kind for kind, _ in spent} >= {"compute"}
    assert ("link" in {kind for kind, _ in spent}) == (strategy == "actor-learner")
    assert "Metrics for Prometheus: http://127.0.0.1:" in capsys.readouterr().err


@dataclass(frozen=True)
class Diverges(A2C):
    """A2C whose loss is not a number."""

    def learn(self, rl: RL, state: Any, batch: Any) -> Any:
        after, metrics = super().learn(rl, state, batch)
        return after, metrics | {"loss": metrics["loss"] * float("nan")}


def test_a_training_that_diverges_shows_it_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Metric]] = []
    diverged = ExporterProcess.diverged

    def diverge_and_scrape(self: ExporterProcess) -> None:
        diverged(self)
        found.append(scrape(self))

    monkeypatch.setattr(ExporterProcess, "diverged", diverge_and_scrape)
    settings = dataclasses.replace(QUIET, metrics_port=0)
    with pytest.raises(UserError, match="Training diverged: loss became nan"):
        algorithm = Diverges(unroll_length=LENGTH, num_envs=4, hidden_sizes=(8,))
        dovetail.train(algorithm, "dovetail:Chain-v0", Fused(), total_steps=16, settings=settings)
    assert samples(found[0])["dovetail_nonfinite_metrics",] == 1


def test_nothing_is_served_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(ExporterProcess, "__init__", refuse)
    dovetail.train(a2c(num_envs=4), "dovetail:Chain-v0", Fused(), total_steps=16, settings=QUIET)


def test_a_resumed_run_takes_another_port_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        port = other.getsockname()[1]
    settings = dataclasses.replace(QUIET, metrics_port=port, display="plain", folder="run")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(patch, 2)
        dovetail.train(
            a2c(num_envs=4), "dovetail:Chain-v0", Fused(), total_steps=960, settings=settings
        )
    assert f"http://127.0.0.1:{port}/metrics" in capsys.readouterr().err
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((HOST, port))
        other.listen()
        assert dovetail.resume(Run.open("run")).summary["env_steps"] == 960
    told = capsys.readouterr().err
    assert f"Port {port} is taken, so metrics are served on another." in told
    assert f"http://127.0.0.1:{port}/metrics" not in told


# The process.


def process(told: list[str]) -> ExporterProcess:
    return ExporterProcess(HOST, 0, INFO, 2, {}, told.append)


def test_what_is_handed_over_is_told_by_another_process() -> None:
    exporter = process([])
    try:
        spans = timeline(("learner", Span(LINK, "gather", 0.0, 0.5, 1, 7, 3, 2, 2)))
        exporter.publish({"env_steps": 64.0, "loss": float("nan")}, spans)
        exporter.publish({"env_steps": 96.0}, spans)
        told = samples(scrape_when(exporter, 96.0))
    finally:
        exporter.close()
        exporter.close()
    assert told["dovetail_bytes_total", "gather", "learner"] == 7
    assert told["dovetail_nonfinite_metrics",] == 1
    assert exporter._process.returncode == 0


def test_a_port_that_is_taken_is_told_by_the_process_too() -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=f"--metrics-port {port} is taken"):
            ExporterProcess(HOST, port, INFO, 0, {}, print)


def test_a_process_that_died_is_told_of_once_and_nobody_waits() -> None:
    told: list[str] = []
    exporter = process(told)
    try:
        exporter._process.kill()
        exporter._process.wait()
        for step in range(3):
            exporter.publish({"env_steps": float(step)}, timeline())
        exporter._thread.join(10)
    finally:
        exporter.close()
    assert told == ["The process that serves --metrics-port died: nobody can scrape now."]


def test_the_process_ends_with_its_input() -> None:
    exporter = process([])
    assert exporter._process.stdin is not None
    exporter._process.stdin.close()
    assert exporter._process.wait(20) == 0
    exporter.close()


# The files beside it, and the page.


def names() -> set[str]:
    """Every name of a sample."""
    ends = {
        "counter": ("_total",),
        "gauge": ("",),
        "histogram": ("_bucket", "_sum", "_count"),
    }
    return {f"{name}{end}" for name, kind in KINDS.items() for end in ends[kind]} | {
        "dovetail_run_info"
    }


@pytest.mark.parametrize("file", ["alerts.yml", "grafana-dashboard.json"])
def test_the_files_use_names_that_exist(file: str) -> None:
    text = (ROOT / "deploy" / "prometheus" / file).read_text(encoding="utf-8")
    used = set(re.findall(r"\bdovetail_\w+", text))
    assert used and used <= names()


def test_the_dashboard_has_no_panel_twice() -> None:
    text = (ROOT / "deploy" / "prometheus" / "grafana-dashboard.json").read_text(encoding="utf-8")
    panels = json.loads(text)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)


def test_the_page_explains_every_metric() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`(dovetail_\w+)", page))
    whole = {
        "dovetail_run_info" if name == "dovetail_run" else name + "_total" * (kind == "counter")
        for name, kind in KINDS.items()
    }
    assert told == whole
