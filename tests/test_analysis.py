"""`explain RUN --analyze`: shares that add up, bytes as planned, and the bottleneck by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small import QUIET, ppo

import dovetail
from dovetail.algorithms import IMPALA
from dovetail.cli.main import main
from dovetail.errors import UserError
from dovetail.run.folder import Run
from dovetail.strategies import ActorLearner, CentralInference, Fused, Local
from dovetail.strategies.interface import Strategy
from dovetail.telemetry.spans import COMPUTE, LINK, QUEUE, WAIT

HOST, JAX = "CartPole-v1", "dovetail:CartPole-v1"


def trained(tmp_path: Path, algorithm: Any, env: str, strategy: Strategy, steps: int) -> Run:
    settings = replace(QUIET, folder=str(tmp_path / "run"))
    return dovetail.train(algorithm, env, strategy, total_steps=steps, settings=settings)


CASES: dict[str, tuple[Any, str, Strategy]] = {
    "local": (ppo(unroll_length=32), HOST, Local()),
    "fused": (ppo(unroll_length=32), JAX, Fused()),
    "actors": (
        IMPALA(32, num_envs=16, hidden_sizes=(8,)),
        HOST,
        ActorLearner(actors=2, processes=False),
    ),
    "inference": (
        IMPALA(32, num_envs=16, hidden_sizes=(8,)),
        HOST,
        CentralInference(workers=4, processes=False),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_spans_of_a_run_add_up(tmp_path: Path, case: str) -> None:
    algorithm, env, strategy = CASES[case]
    found = dovetail.analyze(trained(tmp_path, algorithm, env, strategy, 20_000))
    for worker in found.measured["workers"]:
        if worker != "driver":
            # where all cores are taken, a thread is put aside between two spans as well
            assert 0.9 <= found.of_worker(worker).total <= 1.02, worker
    assert found.measured["dropped_spans"] == 0


def test_links_carry_what_the_plan_says(tmp_path: Path) -> None:
    algorithm, env, strategy = CASES["actors"]
    run = trained(tmp_path, algorithm, env, strategy, 20_000)
    found = dovetail.analyze(run)
    planned = {link.boundary: link for link in found.plan.links}
    for share in found.shares():
        if share.kind == LINK and share.name in ("broadcast", "gather"):
            sent = share.numbers["bytes"] / share.numbers["calls"]
            assert sent == planned[share.name].nbytes
    taken = sum(v for v in found.measured["staleness"].values())
    assert taken == 2 * run.summary["updates"]
    assert max(map(int, found.measured["staleness"])) <= found.plan.staleness


def test_what_holds_a_run_up_is_named(tmp_path: Path) -> None:
    run = trained(tmp_path, *CASES["local"], 20_000)
    found = dovetail.analyze(run)
    worst = found.bottleneck
    assert worst is not None and worst.workers == ("main",)
    told = str(found)
    assert "▶" in told and f"bottleneck: {worst}" in told
    assert "unroll.step" in told and "computes" in told


def measured(run: Run, workers: dict[str, Any]) -> None:
    def numbers(seconds: float) -> dict[str, Any]:
        keys = ("calls", "spans", "bytes", "items", "p50", "p99")
        return {**dict.fromkeys(keys, 1), "seconds": seconds}

    found: dict[str, Any] = {}
    for worker, (compute, wait) in workers.items():
        found[worker] = {
            "wall_s": 10.0,
            COMPUTE: {name: numbers(s) for name, s in compute.items()},
            WAIT: {"others": numbers(wait)},
            LINK: {},
            QUEUE: {},
        }
    more = {"staleness": {}, "dropped_spans": 0, "measures": {}}
    run.write_json("telemetry.json", {"format": 1, "workers": found, **more})


@pytest.mark.parametrize(
    ("workers", "sentence"),
    [
        (
            {
                "learner": ({"learner": 2.0}, 8.0),
                "actor-0": ({"unroll.step": 7.1, "unroll.act": 2.7}, 0.1),
                "actor-1": ({"unroll.step": 7.1, "unroll.act": 2.7}, 0.1),
            },
            "environment steps take 71% of the wall time on 2 workers, which are 98% busy; more",
        ),
        (
            {"learner": ({"learner": 9.5}, 0.5), "actor-0": ({"unroll.step": 3.0}, 7.0)},
            "learning takes 95% of the wall time on learner, which is 95% busy; more devices",
        ),
    ],
)
def test_the_one_that_is_waited_for_is_blamed(
    tmp_path: Path, workers: dict[str, Any], sentence: str
) -> None:
    run = trained(tmp_path, *CASES["actors"], 600)
    measured(run, workers)
    assert sentence in str(dovetail.analyze(run).bottleneck)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path, *CASES["fused"], 2_000)
    assert main(["explain", str(run.path), "--analyze"]) == 0
    assert "bottleneck: one compiled program takes" in capsys.readouterr().out
    assert main(["explain", str(run.path), "--analyze", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bottleneck"]["name"] == "iteration"
    assert main(["trace", str(run.path)]) == 0
    assert (run.path / "trace.json").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda path: path.unlink(), "has no telemetry.json: nothing was measured yet"),
        (lambda path: path.write_text("{"), "telemetry.json cannot be read"),
        (lambda path: path.write_text('{"format": 0}'), "written by another version"),
    ],
)
def test_a_run_without_measurements_is_refused(tmp_path: Path, change: Any, sentence: str) -> None:
    run = trained(tmp_path, *CASES["fused"], 600)
    change(run.path / "telemetry.json")
    with pytest.raises(UserError, match=sentence):
        dovetail.analyze(run)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "has no telemetry.json"),
        ('{"format": 1, "wor', "telemetry.json cannot be read"),
        ('{"format": 1}', "telemetry.json cannot be read: it names no workers"),
        ('{"format": 0}', "written by another version"),
    ],
)
def test_the_command_says_in_a_sentence_why_it_cannot(
    tmp_path: Path, text: str | None, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(str(tmp_path / "run"), "x", {})
    if text is not None:
        run.write_text("telemetry.json", text)
    for words in (["explain", str(run.path), "--analyze"], ["trace", str(run.path)]):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert words[0] == "trace" or sentence in told


def test_links_say_how_long_and_how_many_wait_in_them(tmp_path: Path) -> None:
    run = trained(tmp_path, *CASES["actors"], 20_000)
    found = dovetail.analyze(run)
    links = {link.name: link for link in found.links()}
    assert set(links) == {"broadcast", "gather"}
    gather = links["gather"]
    assert gather.messages_per_s > links["broadcast"].messages_per_s > 0
    assert 0 < gather.p50 <= gather.p99 and links["broadcast"].p50 > 0
    assert 2 <= gather.depth <= 2 * 3  # an update takes two; the staleness is at most two
    told = str(found)
    assert "critical path: " in told and "gather" in told
    whole = json.loads(found.json())
    assert {link["name"] for link in whole["links"]} == {"broadcast", "gather"}
    assert whole["critical_path"] and set(whole["use"]) == set(whole["workers"])


def test_waiting_for_room_is_told_apart(tmp_path: Path) -> None:
    """A learner that does much more than its actors: these are ahead, and wait for room."""
    algorithm = IMPALA(8, num_envs=16, hidden_sizes=(256, 256))
    strategy = ActorLearner(actors=2, processes=False)
    found = dovetail.analyze(trained(tmp_path, algorithm, HOST, strategy, 10_000))
    actor, learner = found.of_worker("actor-0"), found.of_worker("learner")
    assert actor.waits_out > actor.waits_in and learner.waits_out == 0


def test_of_workers_that_wait_for_each_other_the_path_takes_one_of_each_kind(
    tmp_path: Path,
) -> None:
    run = trained(tmp_path, *CASES["actors"], 600)
    actors = {
        "learner": ({"learner": 4.0}, 6.0),
        "actor-0": ({"unroll.step": 5.0}, 5.0),
        "actor-1": ({"unroll.step": 5.5}, 4.5),
    }
    measured(run, actors)
    found = dovetail.analyze(run)
    assert found.critical == ("learner", "actor-1")
    assert [(s.worker, s.name) for s in found.critical_path] == [
        ("learner", "learner"),
        ("actor-1", "unroll.step"),
    ]


@pytest.mark.parametrize("case", CASES)
def test_the_trace_of_a_run_nests_and_its_arrows_connect(tmp_path: Path, case: str) -> None:
    run = trained(tmp_path, *CASES[case], 10_000)
    events = json.loads(dovetail.write_trace(run).read_text())["traceEvents"]
    tracks: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"])
            tracks.setdefault(event["tid"], []).append(span)
    for spans in tracks.values():
        open_until: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start + 1.0:  # a microsecond
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1.0
            open_until.append(end)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys() and bool(starts) == (case in ("actors", "inference"))
    for id_, start in starts.items():
        assert start["tid"] != ends[id_]["tid"] and start["ts"] <= ends[id_]["ts"]
        begun = {span[0] for span in tracks[ends[id_]["tid"]]}
        assert ends[id_]["ts"] in begun
