"""Compares the links that a run used, by its spans, with those of its plan."""

from collections import Counter

from dovetail.graph.ir import Graph
from dovetail.plan.ir import LinkKind, Plan
from dovetail.runtime.report import Report
from dovetail.telemetry.spans import LINK, QUEUE

WITHIN = (LinkKind.FUSED, LinkKind.HANDOFF)
PER_STEP = ("action", "observation")
"""Noted with the halves of an unroll, not one by one."""


def workers_at(plan: Plan, graph: Graph, end: str, side: str) -> set[str]:
    """The workers that a link begins or ends at."""
    names = [node.name for node in graph.on(side)] if end == "state" else [end]
    return {i.worker for name in names for i in plan.instances_of(name)}


def assert_links_are_the_plans(plan: Plan, graph: Graph, report: Report, updates: int) -> None:
    """Every link between workers was used as often as the plan says, from and to whom it says;
    nothing else crossed.

    A report ends with the home side's update: what that update sent to other sides may still be on
    its way, and counts or not.
    """
    sides = {edge.boundary: edge.from_side for edge in graph.edges}
    home = {edge.boundary for edge in graph.edges if edge.to_side == graph.home}
    transfers: Counter[str] = Counter()
    underway: Counter[str] = Counter()
    ends: dict[str, tuple[set[str], set[str]]] = {}
    for link in plan.links:
        if link.kind in WITHIN or link.boundary in PER_STEP:
            continue
        transfers[link.boundary] += link.transfers * updates
        underway[link.boundary] += link.transfers * (link.boundary not in home)
        senders, takers = ends.setdefault(link.boundary, (set(), set()))
        senders |= workers_at(plan, graph, link.source, sides[link.boundary])
        takers |= workers_at(plan, graph, link.target, "")
    used: Counter[str] = Counter()
    found: dict[str, tuple[set[str], set[str]]] = {}
    for worker, spans in report.spans.items():
        for span in spans:
            if span.kind in (LINK, QUEUE) and span.name != "message":
                used[span.name] += span.kind == QUEUE
                found.setdefault(span.name, (set(), set()))[span.kind == QUEUE].add(worker)
    assert found == ends
    assert used.keys() == transfers.keys()
    for boundary, count in transfers.items():
        assert count - underway[boundary] <= used[boundary] <= count, boundary
