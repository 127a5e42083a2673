"""The drawing: sound XML, every box and arrow there, nothing drawn over anything else.

After a change that is meant to alter it:
DOVETAIL_UPDATE_GOLDEN=1 pytest tests/plan/test_plan_svg.py
"""

import os
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from placed import HOST, MACHINE, planned
from toys import ActorGradients, Drift, Toy, TwoUnrolls, drift_task, with_iteration

from dovetail.algorithm import RL, Task
from dovetail.envs.interface import EnvSpec
from dovetail.graph.shares import Graphs
from dovetail.graph.trace import trace
from dovetail.plan import make_plan
from dovetail.plan.svg import svg
from dovetail.strategies import (
    ActorLearner,
    CentralInference,
    Environments,
    Fused,
    Local,
    SplitDevices,
)
from dovetail.strategies.interface import Strategy

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def texts(document: str) -> list[str]:
    root = ElementTree.fromstring(document)
    return ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("text")]


def boxes(document: str) -> list[tuple[float, float, float, float]]:
    """(x, y, width, height) of every outlined box."""
    root = ElementTree.fromstring(document)
    outlined = [e for e in root.iter() if e.tag.endswith("rect") and "stroke" in e.attrib]
    names = ("x", "y", "width", "height")
    return [
        (x, y, width, height)
        for e in outlined
        if e.attrib["stroke"] != "none"
        for x, y, width, height in [tuple(float(e.attrib[name]) for name in names)]
    ]


def test_the_graph_alone() -> None:
    words = texts(svg(trace(Toy(), drift_task(), Drift())))
    for wanted in ("Toy on toy:Drift", "learner", "actor", "environment", "state", "unroll.act"):
        assert wanted in words
    assert words.count("gather") == 1
    assert "336 B, 4 arrays" in words
    assert "mean ×1" in words


def test_with_a_plan_links_and_programs_are_told() -> None:
    plan, graph = make_plan(Local(), Graphs(Toy(), drift_task()), MACHINE)
    words = texts(svg(graph, plan))
    assert "gather · hand-off" in words
    assert "main · program 3" in words
    assert "on the host" in words
    assert "worker main on device 0" in words


def test_fused_boxes_share_a_tint() -> None:
    plan, graph = make_plan(Fused(), Graphs(Toy(), drift_task(), Drift()), MACHINE)
    document = svg(graph, plan)
    assert texts(document).count("main · program 1") == 3
    assert "stroke-dasharray" not in document.replace(
        'stroke-dasharray="6 4" marker-end="url(#head-9ca3af)"', ""
    )  # only the way to the next iteration is dashed


@pytest.mark.parametrize("algorithm", [Toy(), TwoUnrolls(), ActorGradients()])
def test_no_box_covers_another(algorithm: Toy) -> None:
    plan, graph = make_plan(Fused(), Graphs(algorithm, drift_task(), Drift()), MACHINE)
    drawn = boxes(svg(graph, plan))
    assert len(drawn) == len(graph.fragments) + 1
    for (x, y, width, height), (x2, y2, width2, height2) in combinations(drawn, 2):
        assert x + width <= x2 or x2 + width2 <= x or y + height <= y2 or y2 + height2 <= y


@pytest.mark.parametrize(
    ("algorithm", "strategy"),
    [
        (TwoUnrolls(), SplitDevices(actor_devices=2, learner_devices=2, staleness=0)),
        (ActorGradients(), Local()),
    ],
    ids=["TwoUnrolls", "ActorGradients"],
)
def test_the_drawing_is_the_same_to_the_last_coordinate(algorithm: Toy, strategy: Strategy) -> None:
    plan, graph = planned(strategy, algorithm)
    file, drawn = GOLDEN / f"{type(algorithm).__name__}.svg", svg(graph, plan)
    if os.environ.get("DOVETAIL_UPDATE_GOLDEN"):
        file.write_text(drawn, encoding="utf-8")
    assert drawn == file.read_text(encoding="utf-8")


def test_names_are_escaped() -> None:
    spec = EnvSpec('a<b>&"c"', Drift.spec.observation, Drift.spec.action)
    graph = trace(Toy(), Task(spec, 4, 1000))
    assert 'Toy on a<b>&"c"' in texts(svg(graph))


def test_edges_between_the_same_boxes_are_one_arrow() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        trajectory = rl.unroll(self.act, rl.broadcast(state.params), 3)
        reward, first = rl.gather(trajectory.reward), rl.gather(trajectory.first)
        return state, {"reward": reward.sum(), "first": first.sum()}

    graphs = Graphs(with_iteration(iteration), drift_task(), Drift())
    plan, graph = make_plan(Local(), graphs, MACHINE)
    words = texts(svg(graph, plan))
    assert words.count("gather 48 B") == 1
    assert words.count("gather 12 B") == 1
    assert "gather · hand-off" not in words


@pytest.mark.parametrize(
    ("strategy", "env", "told"),
    [
        (ActorLearner(actors=4, staleness=0), None, "4 × actor · program 1"),
        (CentralInference(), HOST, "4 × environments"),
        (CentralInference(), HOST, "inference"),
        (
            SplitDevices(actor_devices=2, learner_devices=2, staleness=0),
            None,
            "4 × actor · program 1",
        ),
        (Environments(), HOST, "2 × environments"),
    ],
)
def test_workers_that_are_alike_share_a_badge(strategy: Strategy, env: Any, told: str) -> None:
    plan, graph = planned(strategy, env=env)
    document = svg(graph, plan)
    assert told in texts(document)
    assert len(boxes(document)) == len(graph.fragments) + 1


def test_what_leaves_as_it_came_goes_through_the_learner() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        return state._replace(params={"w": rl.reduce(rl.broadcast(state.params)["w"] + 1)}), {}

    words = texts(svg(trace(with_iteration(iteration), drift_task(), Drift())))
    assert words.count("reduce") == 1 and words.count("learner") == 2  # the lane and its fragment
