"""Plans that the runtime could not run are refused, each with its own sentence."""

from dataclasses import replace
from typing import Any

import pytest
from placed import HOST, MACHINE, planned
from toys import ActorGradients, Drift, Toy, TwoUnrolls, drift_task, with_iteration

from dovetail.algorithm import Algorithm
from dovetail.errors import UserError
from dovetail.graph.ir import Graph
from dovetail.graph.shares import Graphs
from dovetail.plan import make_plan
from dovetail.plan.check import check, check_placement
from dovetail.plan.ir import Instance, LinkKind, Plan, Worker, WorkerKind
from dovetail.strategies import (
    ActorLearner,
    CentralInference,
    DataParallel,
    Environments,
    Fused,
    Local,
    ParameterServer,
    SplitDevices,
)
from dovetail.strategies.interface import Resources, Strategy


@pytest.fixture(scope="module")
def graph() -> Graph:
    return Graphs(Toy(), drift_task(8), Drift()).whole


@pytest.fixture(scope="module")
def plan(graph: Graph) -> Plan:
    return make_plan(Fused(), Graphs(Toy(), drift_task(8), Drift()), MACHINE)[0]


@pytest.fixture(scope="module")
def acting_apart() -> tuple[Plan, Graph]:
    """Two actors with 4 environments each."""
    return planned(ActorLearner(staleness=0))


def refusal(plan: Plan, graph: Graph, devices: int | None = None) -> str:
    with pytest.raises(UserError) as caught:
        check(plan, graph, devices)
    sentence = str(caught.value)
    assert sentence.startswith(f"The plan of strategy {plan.strategy!r} ")
    assert sentence.endswith((".", "?")) and "\n" not in sentence
    return sentence.removeprefix(f"The plan of strategy {plan.strategy!r} ")


SOUND: dict[str, Strategy] = {
    "fused": Fused(),
    "fused on 4": Fused(devices=4),
    "local": Local(),
    "actor-learner": ActorLearner(actors=4, staleness=0),
    "central-inference": CentralInference(),
    "data-parallel": DataParallel(devices=4),
    "split-devices": SplitDevices(actor_devices=2, learner_devices=2, staleness=0),
    "environments": Environments(),
}


@pytest.mark.parametrize("strategy", SOUND)
@pytest.mark.parametrize("algorithm", [Toy(), TwoUnrolls(), ActorGradients()])
def test_our_own_plans_are_sound(strategy: str, algorithm: Algorithm) -> None:
    for env in (Drift(),) if strategy.startswith("fused") else (Drift(), HOST):
        plan, graph = planned(SOUND[strategy], algorithm, env)
        check(plan, graph, MACHINE.devices)


def test_at_least_one_of_everything(plan: Plan, graph: Graph) -> None:
    assert refusal(replace(plan, num_envs=0), graph) == (
        "has 0 environments, copies 1 of learner, 1 of actor, of which 1 that act make an update, "
        "a staleness of 0 and a prefetch of 0; it needs at least 1 of each, and a staleness and a "
        "prefetch of 0 or more."
    )
    assert "8 environments, copies 0 of learner, 1 of actor" in refusal(
        replace(plan, copies=(("learner", 0), ("actor", 1))), graph
    )
    assert "it needs at least 1 of each" in refusal(replace(plan, joined=0), graph)
    assert "a staleness of -1 " in refusal(replace(plan, staleness=-1), graph)


def test_environments_must_divide_among_the_actors(plan: Plan, graph: Graph) -> None:
    copies = (("learner", 1), ("actor", 3))
    assert refusal(replace(plan, num_envs=20, copies=copies), graph) == (
        "has 20 environments on 3 actors; choose a multiple of 3 environments."
    )


def test_actors_must_divide_among_the_replicas(acting_apart: tuple[Plan, Graph]) -> None:
    plan, graph = acting_apart
    copies = (("learner", 2), ("actor", 2))
    assert refusal(replace(plan, joined=1, copies=copies), graph) == (
        "joins 1 of 2 actors on 2 replicas; let every update take as many actors as there are, "
        "or 1."
    )


def test_workers_that_compute_need_devices(plan: Plan, graph: Graph) -> None:
    bare = (Worker("main", ()),)
    assert refusal(replace(plan, workers=bare), graph) == (
        "gives worker 'main' no device, but programs to run."
    )


def test_a_plan_needs_a_worker(plan: Plan, graph: Graph) -> None:
    assert refusal(replace(plan, workers=(), instances=()), graph) == (
        "has no worker; it needs at least 1."
    )


def test_processes_run_no_programs(plan: Plan, graph: Graph) -> None:
    process = (Worker("main", (0,), WorkerKind.PROCESS),)
    assert refusal(replace(plan, workers=process), graph) == (
        "learns or acts on worker 'main', a process; processes step environments that live on the "
        "host, or host other sides."
    )


def test_no_process_steps_a_jax_environment() -> None:
    plan, graph = planned(Environments())
    workers = tuple(
        replace(worker, kind=WorkerKind.PROCESS) if worker.name == "environments-1" else worker
        for worker in plan.workers
    )
    assert "learns or acts on worker 'environments-1', a process" in refusal(
        replace(plan, workers=workers), graph
    )


def test_workers_have_different_names(plan: Plan, graph: Graph) -> None:
    workers = (Worker("main", (0,)), Worker("main", (1,)))
    assert refusal(replace(plan, workers=workers), graph) == (
        "has 2 workers of the name 'main'; names must differ."
    )


def test_a_worker_has_a_device_once(plan: Plan, graph: Graph) -> None:
    workers = (*plan.workers, Worker("other", (1, 0, 1)))
    assert refusal(replace(plan, workers=workers), graph) == (
        "gives worker 'other' device 1 2 times; give it once."
    )


def test_devices_must_exist(plan: Plan, graph: Graph) -> None:
    far = replace(plan, workers=(replace(plan.workers[0], devices=(5,)),))
    check(far, graph)
    assert refusal(far, graph, devices=4) == (
        "uses device 5, but this machine has 4, numbered from 0; lower --devices, or on a CPU set "
        "XLA_FLAGS=--xla_force_host_platform_device_count=6."
    )


def test_what_is_placed_must_exist(plan: Plan, graph: Graph) -> None:
    strange = (*plan.instances, Instance("lerner", "main"))
    assert refusal(replace(plan, instances=strange), graph) == (
        "places 'lerner', which is no fragment; did you mean 'learner'?"
    )
    lost = (*plan.instances[1:], Instance("learner", "mian"))
    assert refusal(replace(plan, instances=lost), graph) == (
        "places 'learner' on 'mian', which is no worker; did you mean 'main'?"
    )


def without(plan: Plan, fragment: str) -> tuple[Instance, ...]:
    return tuple(i for i in plan.instances if i.fragment != fragment)


def test_the_learner_is_placed_once(plan: Plan, graph: Graph) -> None:
    assert refusal(replace(plan, instances=without(plan, "learner")), graph) == (
        "places 'learner' 0 times; the learner's fragments are placed once, on a worker with a "
        "device for each replica."
    )
    twice = (*plan.instances, *plan.instances_of("learner"))
    assert "places 'learner' 2 times" in refusal(replace(plan, instances=twice), graph)


@pytest.mark.parametrize("fragment", ["unroll.act", "unroll.step"])
def test_every_environment_is_acted_for_and_stepped(
    acting_apart: tuple[Plan, Graph], fragment: str
) -> None:
    plan, graph = acting_apart
    others, (first, last) = without(plan, fragment), plan.instances_of(fragment)

    def placed(*instances: Instance) -> str:
        return refusal(replace(plan, instances=(*others, *instances)), graph)

    wanted = "2 equal ranges" if fragment == "unroll.act" else "each of them once"
    assert placed() == (
        f"places {fragment!r} for the environments none; it must serve 0–7, {wanted}, none across "
        "two actors."
    )
    assert "for the environments 0–3; it must serve 0–7" in placed(first)
    assert "for the environments 0–3, 0–3, 4–7; it" in placed(first, first, last)
    assert "for the environments 0–2, 4–7; it" in placed(replace(first, envs=(0, 3)), last)
    assert "for the environments 0–4, 5–7; it" in placed(
        replace(first, envs=(0, 5)), replace(last, envs=(5, 8))
    )
    assert "for the environments 0–7; it" in placed(replace(first, envs=None))


def test_acting_has_one_place_per_actor(acting_apart: tuple[Plan, Graph]) -> None:
    plan, graph = acting_apart
    first, last = plan.instances_of("unroll.act")
    halves = replace(first, envs=(0, 2)), replace(first, envs=(2, 4))
    instances = (*without(plan, "unroll.act"), *halves, last)
    assert "for the environments 0–1, 2–3, 4–7; it must serve 0–7, 2 equal ranges" in refusal(
        replace(plan, instances=instances), graph
    )


def test_a_side_stays_on_one_worker() -> None:
    plan, graph = planned(Local(), TwoUnrolls())
    workers = (*plan.workers, Worker("other", (1,)))
    moved = tuple(
        replace(i, worker="other") if i.fragment in ("learner.2", "unroll.2.act") else i
        for i in plan.instances
    )
    assert refusal(replace(plan, workers=workers, instances=moved), graph) == (
        "places 'unroll.2.act' on 'other' but other actor fragments on 'main'; the actor side "
        "keeps its state on one worker."
    )
    moved = tuple(
        replace(i, worker="other") if i.fragment == "learner.2" else i for i in plan.instances
    )
    assert "the learner side keeps its state on one worker" in refusal(
        replace(plan, workers=workers, instances=moved), graph
    )


def test_groups_of_environments_are_equal() -> None:
    plan, graph = planned(Environments())
    first, last = plan.instances_of("unroll.step")
    uneven = (replace(first, envs=(0, 2)), replace(last, envs=(2, 8)))
    instances = (*without(plan, "unroll.step"), *uneven)
    assert refusal(replace(plan, instances=instances), graph) == (
        "splits the environments into groups of 2 and 6; make them equal."
    )


def test_a_batch_is_of_whole_groups() -> None:
    plan, graph = planned(CentralInference(workers=2))
    assert refusal(replace(plan, batch=6), graph) == (
        "acts on 6 environments at a time, but they come in groups of 4; choose a multiple."
    )


def test_the_learner_has_a_device_for_each_replica() -> None:
    plan, graph = planned(SplitDevices(actor_devices=2, learner_devices=2, staleness=0))
    workers = (replace(plan.workers[0], devices=(3,)), *plan.workers[1:])
    assert refusal(replace(plan, workers=workers), graph) == (
        "has 2 learner replicas, but worker 'learner' has 1 devices; give it one for each."
    )


def test_staleness_that_the_algorithm_cannot_take(acting_apart: tuple[Plan, Graph]) -> None:
    plan, graph = acting_apart
    assert refusal(replace(plan, staleness=3), graph) == (
        "lets trajectories be 3 versions old, but Toy corrects with nothing and tolerates 0; lower "
        "--staleness to 0, or use an algorithm with V-trace (impala, appo)."
    )
    check(replace(plan, staleness=3), replace(graph, staleness=3))
    check(replace(plan, staleness=3), replace(graph, staleness=None))


def test_without_an_order_something_must_be_allowed_to_be_old(
    acting_apart: tuple[Plan, Graph],
) -> None:
    plan, graph = acting_apart
    assert refusal(replace(plan, ordered=False), graph) == (
        "takes unrolls as they arrive with a staleness of 0; let it be ordered, or allow 1."
    )


def test_actors_run_ahead_only_if_they_meet_the_learner_once() -> None:
    plan, graph = planned(ActorLearner(staleness=0), TwoUnrolls())
    assert refusal(replace(plan, staleness=1), replace(graph, staleness=None)) == (
        "has a staleness of 1, but TwoUnrolls sends to its actors after it has heard from them, "
        "within one iteration; use a staleness of 0."
    )


def test_links_join_what_is_placed(plan: Plan, graph: Graph) -> None:
    stray = (*plan.links, replace(plan.links[1], target="learner.2"))
    assert refusal(replace(plan, links=stray), graph) == (
        "links gather to 'learner.2', which is not placed; did you mean 'learner'?"
    )


@pytest.mark.parametrize("number", range(4))
def test_every_edge_needs_its_link(plan: Plan, graph: Graph, number: int) -> None:
    lost = plan.links[number]
    fewer = tuple(link for link in plan.links if link is not lost)
    assert refusal(replace(plan, links=fewer), graph) == (
        f"carries {lost.boundary} from {lost.source!r} to {lost.target!r} by 0 links; the graph "
        "has 1 such edges, each for one link."
    )
    assert "by 2 links" in refusal(replace(plan, links=(*plan.links, lost)), graph)


def test_a_link_that_carries_no_edge(plan: Plan, graph: Graph) -> None:
    extra = replace(plan.links[1], source="learner", target="unroll.act")
    assert "from 'learner' to 'unroll.act' by 1 links; the graph has 0" in refusal(
        replace(plan, links=(*plan.links, extra)), graph
    )


def carried(plan: Plan, kind: LinkKind, *boundaries: str) -> Plan:
    links = [replace(x, kind=kind) if x.boundary in boundaries else x for x in plan.links]
    return replace(plan, links=tuple(links))


def test_fused_and_handed_over_stays_within_a_worker(acting_apart: tuple[Plan, Graph]) -> None:
    plan, graph = acting_apart
    assert refusal(carried(plan, LinkKind.FUSED, "broadcast"), graph) == (
        "carries broadcast from 'state' on thread learner to 'unroll.act' on thread actor-0 by a "
        "fused link; fused and hand-off links stay within a worker, queues join threads, shared "
        "memory joins processes."
    )
    for kind in (LinkKind.HANDOFF, LinkKind.SHARED_MEMORY):
        assert f"by a {kind} link; " in refusal(carried(plan, kind, "gather"), graph)


def test_a_queue_joins_threads(plan: Plan, graph: Graph) -> None:
    assert "'unroll.act' on thread main to 'learner' on thread main by a queue link" in refusal(
        carried(plan, LinkKind.QUEUE, "gather"), graph
    )


def test_shared_memory_joins_processes() -> None:
    plan, graph = planned(Environments(processes=True), env=HOST)
    check(plan, graph)
    for kind in (LinkKind.FUSED, LinkKind.HANDOFF, LinkKind.QUEUE):
        assert f"on process environments-0 by a {kind} link" in refusal(
            carried(plan, kind, "action"), graph
        )


def unjoined(self: Any, rl: Any, state: Any) -> Any:
    """Never averages."""
    batch = rl.gather(rl.unroll(self.act, rl.broadcast(state.params), 2))
    return state, {"reward": batch.reward.mean()}


def test_replicas_that_nothing_joins() -> None:
    planned(Fused(), with_iteration(unjoined))
    with pytest.raises(
        UserError, match=r"4 learner replicas, but Altered never calls rl\.mean, so"
    ):
        planned(Fused(devices=4), with_iteration(unjoined))
    with pytest.raises(
        UserError, match=r"2 learner replicas, but Altered never calls rl\.mean, so"
    ):
        planned(
            SplitDevices(actor_devices=2, learner_devices=2, staleness=0), with_iteration(unjoined)
        )


def test_a_mean_among_the_actors_is_joined_only_in_one_program() -> None:
    def iteration(self: Any, rl: Any, state: Any) -> Any:
        trajectory = rl.unroll(self.act, rl.broadcast(state.params), 2)
        level = rl.mean(trajectory.reward.mean())
        return state, {"level": rl.reduce(level)}

    algorithm = with_iteration(iteration)
    planned(DataParallel(), algorithm)
    planned(Local(), algorithm, HOST)
    for strategy in (DataParallel(), SplitDevices(actor_devices=2, learner_devices=2, staleness=0)):
        with pytest.raises(UserError, match=r"has 2 replicas, but Altered calls rl\.mean on the"):
            planned(strategy, algorithm, HOST)


def test_a_users_strategy_is_checked_before_its_links_are_worked_out() -> None:
    class Careless(Local):
        def plan(self, graph: Graph, resources: Resources) -> Plan:
            plan = super().plan(graph, resources)
            return replace(plan, instances=without(plan, "unroll.step"))

    with pytest.raises(UserError, match=r"strategy 'careless' places 'unroll\.step' for the env"):
        planned(Careless())


def test_a_placement_can_be_checked_before_it_has_links(plan: Plan, graph: Graph) -> None:
    check_placement(replace(plan, links=()), graph)
    assert "by 0 links" in refusal(replace(plan, links=()), graph)


def test_the_parameter_server_takes_gradients_only() -> None:
    with pytest.raises(UserError) as caught:
        planned(ParameterServer())
    sentence = str(caught.value)
    assert sentence.startswith(
        "ParameterServer's workers send gradients (rl.reduce), but Toy sends whole trajectories "
        "(rl.gather at "
    )
    assert sentence.endswith("): use --strategy actor-learner, or an algorithm such as a3c.")
    assert "toys.py:" in sentence
    plan, _ = planned(ParameterServer(synchronous=True), ActorGradients())
    assert (plan.actors, plan.joined, plan.staleness, plan.ordered) == (2, 2, 0, True)
