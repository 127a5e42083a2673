"""Spans are bounded, never lost in silence, and on one clock; totals of them do not grow."""

import json
from pathlib import Path

import pytest

from dovetail.run.folder import Run
from dovetail.telemetry.spans import COMPUTE, LINK, QUEUE, WAIT, Span, Track, clock_ahead, on_clock
from dovetail.telemetry.timeline import FILE, SPANS, Timeline, Totals, load_spans
from dovetail.telemetry.trace import trace_events, write_trace


def test_a_track_gives_each_span_once() -> None:
    track = Track("a")
    track.add(COMPUTE, "learner", 1.0, 0.5, nbytes=8)
    assert track.drain() == [Span(COMPUTE, "learner", 1.0, 0.5, 1, 8)]
    assert track.drain() == [] and track.dropped == 0


def test_a_full_track_forgets_the_oldest_and_counts_them() -> None:
    track = Track("a", limit=3)
    for i in range(5):
        track.add(COMPUTE, str(i), float(i), 0.0)
    assert track.dropped == 2
    assert [span.name for span in track.drain()] == ["2", "3", "4"]
    assert track.dropped == 2
    track.extend([Span(WAIT, "x", 0.0, 0.0)] * 2)
    assert len(track.drain()) == 2 and track.dropped == 2


def test_the_clock_of_another_process_is_found_from_a_call() -> None:
    """It is 100 s ahead; the call takes 1 s there, 4 s of work, 1 s back."""
    ahead = clock_ahead(called=10.0, answered=16.0, begun=111.0, done=115.0)
    assert ahead == 100.0
    assert on_clock([Span(COMPUTE, "a", 112.0, 1.0)], ahead)[0].start == 12.0


def test_quantiles_are_near() -> None:
    totals = Totals()
    for i in range(1, 1001):
        totals.add(Span(COMPUTE, "a", 0.0, i / 1000))
    assert totals.quantile(0.5) == pytest.approx(0.5, rel=0.2)
    assert totals.quantile(0.99) == pytest.approx(0.99, rel=0.2)
    assert len(totals.buckets) < 60


def test_many_short_calls_are_one_span() -> None:
    totals = Totals()
    totals.add(Span(COMPUTE, "step", 0.0, 1.0, calls=100, items=800))
    assert (totals.calls, totals.spans, totals.items) == (100, 1, 800)
    assert totals.quantile(0.5) == pytest.approx(0.01, rel=0.2)


def timeline() -> Timeline:
    made = Timeline()
    made.add(
        {
            "actor-0": [
                Span(COMPUTE, "unroll.step", 0.0, 6.0, 100, items=800),
                Span(COMPUTE, "unroll.act", 6.0, 3.0, 100, items=800),
                Span(LINK, "gather", 9.0, 0.5, nbytes=1000, items=1, version=3),
                Span(WAIT, "weights", 9.5, 0.5, version=4),
            ],
            "learner": [
                Span(WAIT, "results", 0.0, 9.5),
                Span(QUEUE, "gather", 9.4, 0.1, items=2, version=3, staleness=1),
                Span(COMPUTE, "learner", 9.6, 0.4, version=4),
            ],
        }
    )
    return made


def test_totals_and_spans_are_written_and_read_back(tmp_path: Path) -> None:
    run, made = Run.create(str(tmp_path / "run"), "x", {}), timeline()
    made.write(run, last=True)
    found = json.loads((run.path / FILE).read_text())
    assert found["workers"]["actor-0"][COMPUTE]["unroll.step"]["seconds"] == 6.0
    assert found["workers"]["actor-0"]["wall_s"] == 10.0
    assert found["staleness"] == {"1": 1}
    spans = load_spans(run.path / SPANS)
    assert spans[2] == ("actor-0", Span(LINK, "gather", 9.0, 0.5, 1, 1000, 1, 3, -1))
    assert len(spans) == 7


def test_a_trace_is_valid_and_its_arrows_connect(tmp_path: Path) -> None:
    run, made = Run.create(str(tmp_path / "run"), "x", {}), timeline()
    made.write(run, last=True)
    events = json.loads(write_trace(run, tmp_path / "t.json").read_text())["traceEvents"]
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
    assert set(tracks) == {"actor-0", "learner"}
    whole = [e for e in events if e["ph"] == "X"]
    assert len(whole) == 6 and all(e["dur"] >= 0 and e["ts"] >= 0 for e in whole)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts and starts.keys() == ends.keys()
    assert all(starts[i]["ts"] <= ends[i]["ts"] for i in starts)
    assert (len(starts), len(events)) == (1, 2 + 6 + 2)
    gathered = next(e for e in starts.values() if e["name"] == "gather")
    assert gathered["tid"] == tracks["actor-0"]
    assert ends[gathered["id"]]["tid"] == tracks["learner"]


def test_a_trace_is_of_the_last_seconds() -> None:
    spans = [("a", Span(COMPUTE, str(i), float(i), 0.5)) for i in range(20)]
    whole = [e for e in trace_events(spans, 5.0) if e["ph"] == "X"]
    assert [e["name"] for e in whole] == ["15", "16", "17", "18", "19"]
