"""The plan as text, and what it compiles together."""

import pytest
from toys import Drift, Toy, drift_task

from dovetail.graph.ir import Graph
from dovetail.graph.trace import trace
from dovetail.plan import make_plan
from dovetail.plan.show import text
from dovetail.policies.fused import Fused
from dovetail.policies.interface import Resources
from dovetail.policies.local import Local

MACHINE = Resources(devices=4, cores=2)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(Toy(), drift_task(8), Drift())


def test_fused_fragments_are_one_program(graph: Graph) -> None:
    plan = make_plan(Fused(envs=8), graph, MACHINE)
    assert plan.programs("main") == [("unroll.act", "unroll.step", "learner")]
    assert plan.programs("other") == []


def test_handed_over_fragments_are_programs_of_their_own(graph: Graph) -> None:
    plan = make_plan(Local(envs=8), graph, MACHINE)
    assert plan.programs("main") == [("unroll.act",), ("unroll.step",), ("learner",)]


def test_the_text_of_a_fused_plan() -> None:
    graph = trace(Toy(), drift_task(8), Drift(), replicas=4)
    lines = text(make_plan(Fused(envs=8, devices=4), graph, MACHINE), graph).splitlines()
    assert lines[0] == "plan  fused: 8 environments, 4 learner replicas, 2 on each"
    assert lines[2] == "  worker main on devices 0, 1, 2, 3"
    assert lines[4].split()[:6] == ["1", "unroll.act", "+", "unroll.step", "+", "learner"]
    assert [line.split()[0] for line in lines[7:11]] == [
        "broadcast",
        "gather",
        "action",
        "observation",
    ]
    assert lines[9].endswith("fused  8 B × 3")
    assert lines[-1].startswith("  note: ")


def test_the_text_of_a_local_plan_on_the_host() -> None:
    graph = trace(Toy(), drift_task(8))
    lines = text(make_plan(Local(envs=8), graph, MACHINE), graph).splitlines()
    assert lines[0] == "plan  local: 8 environments, 1 learner replica"
    assert lines[2] == "  worker main on device 0"
    assert lines[5].split() == ["2", "unroll.step", "on", "the", "host"]
    assert lines[9].split()[:6] == ["broadcast", "state", "→", "unroll.act", "hand-off", "32"]
