"""The graph as text and as JSON."""

import json

import pytest
from toys import ActorGradients, Drift, Toy, drift_task

from dovetail.boundaries import ACTOR
from dovetail.graph import show
from dovetail.graph.trace import trace


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1234, "1.23 kB"),
        (45_678, "45.7 kB"),
        (999_400, "999 kB"),
        (999_600, "1.00 MB"),
        (1_500_000, "1.50 MB"),
        (2_000_000_000, "2.00 GB"),
        (3_210_000_000_000, "3.21 TB"),
    ],
)
def test_quantities_have_three_figures(number: int, words: str) -> None:
    assert show.quantity(number, "B") == words


def test_counts_know_the_plural() -> None:
    assert show.count(1, "step") == "1 step"
    assert show.count(2048, "step") == "2,048 steps"


def test_places_are_told_without_folder_and_column() -> None:
    assert show.base_name("/home/somebody/ppo.py:181:17") == "ppo.py:181"


def test_the_text_of_a_graph() -> None:
    lines = show.text(trace(Toy(), drift_task())).splitlines()
    assert lines[0] == "graph  Toy on toy:Drift: 4 environments, 12 steps per iteration"
    assert lines[2].split() == ["node", "side", "compute", "in", "out"]
    assert [line.split()[0] for line in lines[3:8]] == ["unroll", "├", "├", "└", "learner"]
    assert "3 steps × 4 environments" in lines[3]
    assert "on the host" in lines[6] and "16 B" in lines[6] and "88 B" in lines[6]
    assert lines[7].endswith("mean ×1")
    assert lines[10].split()[:5] == ["broadcast", "state", "→", "unroll", "32"]
    assert lines[11].split()[:5] == ["gather", "unroll", "→", "learner", "336"]
    assert lines[11].split()[-1].startswith("toys.py:")


def test_several_actors_are_counted() -> None:
    told = show.text(trace(Toy(), drift_task(), Drift(), {ACTOR: 2}))
    assert "3 steps × 2 environments × 2 actors" in told
    assert "actors" not in show.text(trace(Toy(), drift_task(), Drift()))


def test_a_host_environment_has_no_flops() -> None:
    on_host, compiled = (show.to_json(trace(Toy(), drift_task(), env)) for env in (None, Drift()))
    steps = [graph["nodes"][0]["step"] for graph in (on_host, compiled)]
    assert [step["host"] for step in steps] == [True, False]
    assert steps[0]["flops"] is None and steps[1]["flops"] > 0


def test_an_unroll_counts_acting_and_stepping() -> None:
    (unroll,) = trace(Toy(), drift_task(), Drift()).unrolls
    assert unroll.flops == 3 * (unroll.act.flops + unroll.step.flops)
    assert min(unroll.act.flops, unroll.step.flops) > 0


def test_the_text_is_the_same_every_time() -> None:
    texts = {show.text(trace(ActorGradients(), drift_task(), Drift())) for _ in range(2)}
    assert len(texts) == 1


def test_json_says_what_the_text_says() -> None:
    graph = json.loads(json.dumps(show.to_json(trace(Toy(), drift_task(), Drift()))))
    unroll, learner = graph["nodes"]
    assert (unroll["name"], unroll["length"], unroll["step"]["host"]) == ("unroll", 3, False)
    assert (unroll["bytes_to_environment"], unroll["bytes_to_actor"]) == (16, 88)
    assert learner["means"] == 1
    assert {"shape": [3, 4, 4], "dtype": "float32"} in learner["inputs"]
    assert [edge["bytes"] for edge in graph["edges"]] == [32, 336]
    assert graph["metrics"] == ["loss"]
    assert graph["steps_per_iteration"] == 12


def test_a_rate_below_a_thousand_is_rounded() -> None:
    assert show.quantity(312.48271, "B") == "312 B"
