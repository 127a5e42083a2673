"""The plan as text, and what it compiles together."""

from placed import HOST, planned

from dovetail.graph.ir import Graph
from dovetail.plan.ir import Plan
from dovetail.plan.show import alike, text
from dovetail.strategies import ActorLearner, CentralInference, Fused, Local, SplitDevices


def lines_of(plan_and_graph: tuple[Plan, Graph]) -> list[str]:
    return text(*plan_and_graph).splitlines()


def test_fused_fragments_are_one_program() -> None:
    plan, _ = planned(Fused())
    assert plan.programs("main") == [("unroll.act", "unroll.step", "learner")]
    assert plan.programs("other") == []


def test_handed_over_fragments_are_programs_of_their_own() -> None:
    plan, _ = planned(Local())
    assert plan.programs("main") == [("unroll.act",), ("unroll.step",), ("learner",)]


def test_the_text_of_a_fused_plan() -> None:
    lines = lines_of(planned(Fused(devices=4)))
    assert lines[0] == (
        "plan  fused: 8 environments, 4 learner replicas, 4 actors with 2 each, staleness 0"
    )
    assert lines[2] == "  worker main on devices 0, 1, 2, 3"
    assert lines[4].split()[:6] == ["1", "unroll.act", "+", "unroll.step", "+", "learner"]
    assert [line.split()[0] for line in lines[7:11]] == [
        "broadcast",
        "gather",
        "action",
        "observation",
    ]
    assert lines[9].endswith("fused  8 B × 12")
    assert lines[-1].startswith("  note: ")


def test_the_text_of_a_local_plan_on_the_host() -> None:
    lines = lines_of(planned(Local(), env=HOST))
    assert lines[0] == "plan  local: 8 environments, 1 learner replica, staleness 0"
    assert lines[2] == "  worker main on device 0"
    assert lines[5].split() == ["2", "unroll.step", "on", "the", "host"]
    assert lines[9].split()[:6] == ["broadcast", "state", "→", "unroll.act", "hand-off", "32"]


def test_workers_that_are_alike_are_told_of_once() -> None:
    plan, graph = planned(ActorLearner(actors=4, staleness=0, processes=True), env=HOST)
    assert [len(group) for group in alike(plan)] == [1, 4, 4]
    told = text(plan, graph)
    assert "  worker learner on device 0\n" in told
    assert "  workers actor-0 … actor-3 on device 0, 2 environments each\n" in told
    assert (
        "  workers environments-0 … environments-3, each a process, 2 environments each\n" in told
    )
    assert "4 actors with 2 each" in told and "note: 9 workers share 2 cores" in told


def test_workers_on_different_devices_are_told_apart() -> None:
    plan, graph = planned(SplitDevices(actor_devices=2, learner_devices=1, threads=2, staleness=0))
    assert [len(group) for group in alike(plan)] == [1, 2, 2]
    told = text(plan, graph)
    assert "  worker learner on device 2\n" in told
    assert "  workers actor-0 … actor-1 on device 0, 2 environments each\n" in told
    assert "  workers actor-2 … actor-3 on device 1, 2 environments each\n" in told


def test_batches_of_acting_are_told() -> None:
    lines = lines_of(planned(CentralInference()))
    assert "acting in batches of 6" in lines[0]
    assert "  worker inference on device 0, 8 environments" in lines
