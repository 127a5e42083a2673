"""What the plan prints is what happens: the spans of a run name the links that the plan has."""

from collections import Counter
from typing import Any

import pytest
from agreement import ALGORITHMS, CARTPOLE, HOST
from small import Started

from dovetail.graph.ir import Graph
from dovetail.plan.ir import LinkKind, Plan
from dovetail.policies import (
    ActorLearner,
    CentralInference,
    DataParallel,
    Environments,
    Fused,
    Local,
    ParameterServer,
    SplitDevices,
)
from dovetail.policies.interface import Policy
from dovetail.runtime.channels import REPORT
from dovetail.runtime.report import Report
from dovetail.telemetry.spans import LINK, QUEUE

WITHIN = (LinkKind.FUSED, LinkKind.HANDOFF)
PER_STEP = ("action", "observation")
"""Noted with the halves of an unroll, not one by one."""
UPDATES = 3
CASES: dict[str, tuple[str, str, Policy]] = {
    "fused": ("ppo", CARTPOLE, Fused(8)),
    "local": ("ppo", HOST, Local(8)),
    "local with a replay": ("dqn", HOST, Local(8)),
    "replay in a worker": ("dqn", HOST, Local(8, sides=("replay",))),
    "actors": ("ppo", HOST, ActorLearner(8, actors=2, staleness=0, processes=False)),
    "shards": (
        "dqn-prioritised",
        HOST,
        ActorLearner(8, actors=4, staleness=0, shards=2, processes=False),
    ),
    "inference": ("ppo", HOST, CentralInference(8, workers=2, processes=False)),
    "replicas": ("ppo", HOST, DataParallel(8, devices=2)),
    "replicas with a replay": ("dqn", HOST, DataParallel(8, devices=2)),
    "split devices": ("ppo", HOST, SplitDevices(8, 2, 2, staleness=0)),
    "environments": ("ppo", HOST, Environments(8, workers=2, processes=False)),
    "gradients": ("a3c", HOST, ParameterServer(8, workers=2, synchronous=True)),
}


def workers_at(plan: Plan, graph: Graph, end: str, side: str) -> set[str]:
    """The workers that a link begins or ends at."""
    names = [node.name for node in graph.on(side)] if end == "state" else [end]
    placed = [
        f"{name}.act" if name.startswith("unroll") and "." not in name else name for name in names
    ]
    return {i.worker for name in placed for i in plan.instances_of(name)}


def assert_links_are_the_plans(plan: Plan, graph: Graph, report: Report, updates: int) -> None:
    """Every link between workers was used as often as the plan says, from and to whom it says;
    nothing else crossed."""
    sides = {edge.boundary: edge.from_side for edge in graph.edges}
    transfers: Counter[str] = Counter()
    ends: dict[str, tuple[set[str], set[str]]] = {}
    for link in plan.links:
        if link.kind in WITHIN or link.boundary in PER_STEP:
            continue
        transfers[link.boundary] += link.transfers * updates
        senders, takers = ends.setdefault(link.boundary, (set(), set()))
        senders |= workers_at(plan, graph, link.source, sides[link.boundary])
        takers |= workers_at(plan, graph, link.target, "")
    used: Counter[str] = Counter()
    found: dict[str, tuple[set[str], set[str]]] = {}
    for worker, spans in report.spans.items():
        for span in spans:
            if span.kind in (LINK, QUEUE) and span.name not in (REPORT, "message"):
                used[span.name] += span.kind == QUEUE
                found.setdefault(span.name, (set(), set()))[span.kind == QUEUE].add(worker)
    assert found == ends
    assert used == transfers


@pytest.mark.parametrize("case", CASES)
def test_links_are_used_as_the_plan_says(case: str) -> None:
    algorithm, env, policy = CASES[case]
    chosen: Any = ALGORITHMS[algorithm]
    with Started(chosen, env, policy) as running:
        report = running.advance(UPDATES)
    assert_links_are_the_plans(running.plan, running.graph, report, UPDATES)


def test_an_insert_does_not_pass_the_learner() -> None:
    algorithm, env, policy = CASES["shards"]
    with Started(ALGORITHMS[algorithm], env, policy) as running:
        spans = running.advance(UPDATES).spans
    assert not [s for s in spans["learner"] if s.name == "insert"]
    assert [s for s in spans["replay-1"] if s.name == "insert"]
