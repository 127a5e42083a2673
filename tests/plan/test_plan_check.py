"""Plans that the runtime could not run are refused, each with its own sentence."""

from dataclasses import replace
from typing import Any

import pytest
from toys import Drift, Toy, TwoUnrolls, drift_task, with_iteration

from dovetail.errors import UserError
from dovetail.graph.ir import Graph
from dovetail.graph.trace import trace
from dovetail.plan import make_plan
from dovetail.plan.check import check
from dovetail.plan.ir import Instance, LinkKind, Plan, Worker
from dovetail.policies.fused import Fused
from dovetail.policies.interface import Resources
from dovetail.policies.local import Local

MACHINE = Resources(devices=4, cores=2)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(Toy(), drift_task(8), Drift())


@pytest.fixture(scope="module")
def plan(graph: Graph) -> Plan:
    return make_plan(Fused(envs=8), graph, MACHINE)


def refusal(plan: Plan, graph: Graph, devices: int | None = None) -> str:
    with pytest.raises(UserError) as caught:
        check(plan, graph, devices)
    return str(caught.value)


def test_our_own_plans_are_sound() -> None:
    for algorithm in (Toy(), TwoUnrolls()):
        whole = trace(algorithm, drift_task(8), Drift())
        part = trace(algorithm, drift_task(8), Drift(), replicas=4)
        make_plan(Fused(envs=8), whole, MACHINE)
        make_plan(Local(envs=8), whole, MACHINE)
        make_plan(Fused(envs=8, devices=4), part, MACHINE)


def test_at_least_one_environment_and_one_replica(plan: Plan, graph: Graph) -> None:
    assert refusal(replace(plan, num_envs=0), graph) == (
        "The plan of policy 'fused' has 0 environments and 1 replicas; it needs at least 1 of each."
    )
    assert "8 environments and 0 replicas" in refusal(replace(plan, replicas=0), graph)


def test_environments_must_divide_among_the_replicas(plan: Plan, graph: Graph) -> None:
    assert refusal(replace(plan, num_envs=20, replicas=3), graph) == (
        "The plan of policy 'fused' has 20 environments on 3 replicas, but the graph was traced "
        "with 8 on each; choose a multiple of 3 environments."
    )


def test_workers_need_devices(plan: Plan, graph: Graph) -> None:
    assert "gives worker 'main' no device" in refusal(
        replace(plan, workers=(Worker("main", ()),)), graph
    )
    assert "no device" in refusal(replace(plan, workers=()), graph)


def test_workers_have_different_names(plan: Plan, graph: Graph) -> None:
    workers = (Worker("main", (0,)), Worker("main", (1,)))
    assert "2 workers of the name 'main'" in refusal(replace(plan, workers=workers), graph)


def test_a_device_is_used_once(plan: Plan, graph: Graph) -> None:
    workers = (Worker("main", (0,)), Worker("other", (1, 0)))
    assert "uses device 0 2 times" in refusal(replace(plan, workers=workers), graph)


def test_devices_must_exist(plan: Plan, graph: Graph) -> None:
    far = replace(plan, workers=(Worker("main", (5,)),))
    check(far, graph)
    assert refusal(far, graph, devices=4) == (
        "The plan of policy 'fused' uses device 5, but this machine has 4, numbered from 0; lower "
        "--devices, or on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count=6."
    )


def test_what_is_placed_must_exist(plan: Plan, graph: Graph) -> None:
    strange = (*plan.instances, Instance("lerner", "main"))
    assert "places 'lerner', which is no fragment; did you mean 'learner'?" in refusal(
        replace(plan, instances=strange), graph
    )
    lost = (*plan.instances[:-1], Instance("learner", "mian"))
    assert "places 'learner' on 'mian', which is no worker; did you mean 'main'?" in refusal(
        replace(plan, instances=lost), graph
    )


def test_every_fragment_is_placed_once_for_each_replica(plan: Plan, graph: Graph) -> None:
    assert "places 'learner' on 0 devices; with 1 replicas it must be on 1" in refusal(
        replace(plan, instances=plan.instances[:-1]), graph
    )
    assert "places 'learner' on 2 devices" in refusal(
        replace(plan, instances=(*plan.instances, plan.instances[-1])), graph
    )


def test_links_join_what_is_placed(plan: Plan, graph: Graph) -> None:
    stray = (*plan.links, replace(plan.links[1], target="learner.2"))
    assert "links gather to 'learner.2', which is not placed; did you mean 'learner'?" in refusal(
        replace(plan, links=stray), graph
    )


@pytest.mark.parametrize("number", range(4))
def test_every_edge_needs_its_link(plan: Plan, graph: Graph, number: int) -> None:
    lost = plan.links[number]
    fewer = tuple(link for link in plan.links if link is not lost)
    assert refusal(replace(plan, links=fewer), graph) == (
        f"The plan of policy 'fused' carries {lost.boundary} from {lost.source!r} to "
        f"{lost.target!r} by 0 links; the graph has 1 such edges, each for one link."
    )
    assert "by 2 links" in refusal(replace(plan, links=(*plan.links, lost)), graph)


def test_a_link_that_carries_no_edge(plan: Plan, graph: Graph) -> None:
    extra = replace(plan.links[1], source="learner", target="unroll.act")
    assert "from 'learner' to 'unroll.act' by 1 links; the graph has 0" in refusal(
        replace(plan, links=(*plan.links, extra)), graph
    )


def apart(plan: Plan, kind: LinkKind) -> Plan:
    """The learner on a worker of its own; what crosses is carried by `kind`."""
    return replace(
        plan,
        workers=(Worker("actors", (0,)), Worker("learner", (1,))),
        instances=tuple(
            Instance(i.fragment, "learner" if i.fragment == "learner" else "actors")
            for i in plan.instances
        ),
        links=tuple(
            replace(link, kind=kind) if link.boundary in ("broadcast", "gather") else link
            for link in plan.links
        ),
    )


def test_fused_links_stay_within_a_worker(plan: Plan, graph: Graph) -> None:
    check(apart(plan, LinkKind.HANDOFF), graph)
    assert refusal(apart(plan, LinkKind.FUSED), graph) == (
        "The plan of policy 'fused' fuses broadcast from 'state' on learner to 'unroll.act' on "
        "actors; a fused link stays within one worker."
    )


def test_replicas_that_nothing_joins() -> None:
    def iteration(self: Any, rl: Any, state: Any) -> Any:
        batch = rl.gather(rl.unroll(self.act, rl.broadcast(state.params), 2))
        return state, {"reward": batch.reward.mean()}

    algorithm = with_iteration(iteration)
    make_plan(Fused(envs=8), trace(algorithm, drift_task(8), Drift()), MACHINE)
    graph = trace(algorithm, drift_task(8), Drift(), replicas=4)
    with pytest.raises(UserError, match=r"4 learner replicas, but Altered never calls rl\.mean"):
        make_plan(Fused(envs=8, devices=4), graph, MACHINE)
