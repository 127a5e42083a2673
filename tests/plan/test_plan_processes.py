"""Which workers share a process of a cluster, and on which node it is."""

from dataclasses import replace

import pytest
from placed import HOST, planned
from toys import Toy

from dovetail.algorithm import Correction
from dovetail.errors import UserError
from dovetail.plan import serial
from dovetail.plan.ir import Cluster, LinkKind, Needs, Node, Plan, Resources
from dovetail.plan.processes import part_of
from dovetail.plan.show import text
from dovetail.strategies import (
    ActorLearner,
    CentralInference,
    DataParallel,
    Environments,
    Fused,
    Local,
    SplitDevices,
)
from dovetail.strategies.interface import Strategy

NODES = (Node("a", "a" * 8, 4), Node("b", "b" * 8, 3), Node("c", "c" * 8, 2))
CLUSTER = Cluster(NODES)


class Patient(Toy):
    """Bears any staleness."""

    correction = Correction("patience", None)


def on(cluster: Cluster, strategy: Strategy, env: object = HOST, num_envs: int = 8) -> Plan:
    cores = int(sum(node.cpus for node in cluster.nodes))
    return planned(strategy, Patient(num_envs=num_envs), env, Resources(cores, cores, cluster))[0]


def processes(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {process.name: process.workers for process in plan.processes}


def nodes(plan: Plan) -> dict[str, str]:
    return {process.name: process.node for process in plan.processes}


def test_one_process_where_steps_are_exchanged() -> None:
    assert processes(on(CLUSTER, Local())) == {"learner": ("main",)}
    assert processes(on(CLUSTER, Fused(), None)) == {"learner": ("main",)}
    plan = on(CLUSTER, Environments(workers=2))
    assert processes(plan) == {"learner": ("main", "environments-0", "environments-1")}
    assert plan.processes[0].cpus == 2


def test_each_actor_has_a_process_with_what_steps_for_it() -> None:
    assert processes(on(CLUSTER, ActorLearner(actors=2, processes=True))) == {
        "learner": ("learner",),
        "actor-0": ("actor-0", "environments-0"),
        "actor-1": ("actor-1", "environments-1"),
    }
    inference = on(CLUSTER, CentralInference(workers=2))
    assert processes(inference) == {
        "learner": ("learner",),
        "inference": ("inference", "environments-0", "environments-1"),
    }


def test_an_actor_steps_in_its_own_process_unless_told() -> None:
    assert processes(on(CLUSTER, ActorLearner(actors=2)))["actor-0"] == ("actor-0",)


def test_learners_on_several_devices_have_a_process_each() -> None:
    plan = on(CLUSTER, DataParallel(devices=2))
    assert processes(plan) == {
        "learner-0": ("learner", "actor-0"),
        "learner-1": ("learner", "actor-1"),
    }
    assert plan.ranks == 2
    assert {link.kind for link in plan.links if link.boundary == "gather"} == {LinkKind.QUEUE}
    compiled = on(CLUSTER, DataParallel(devices=2), None)
    assert processes(compiled) == {"learner-0": ("replicas",), "learner-1": ("replicas",)}


def test_actors_on_a_device_of_their_own_share_its_process() -> None:
    plan = on(CLUSTER, SplitDevices(actor_devices=2, learner_devices=2, threads=2))
    assert processes(plan) == {
        "learner-0": ("learner",),
        "learner-1": ("learner",),
        "actor-0": ("actor-0", "actor-1"),
        "actor-2": ("actor-2", "actor-3"),
    }
    assert [process.rank for process in plan.processes] == [0, 1, 0, 1]


def test_devices_of_one_process() -> None:
    cluster = replace(CLUSTER, learner_devices=2)
    assert list(processes(on(cluster, DataParallel(devices=4)))) == ["learner-0", "learner-1"]
    with pytest.raises(UserError, match="3 learner replicas cannot be put into processes of 2"):
        on(cluster, DataParallel(devices=3), num_envs=6)


def test_learners_are_apart_and_actors_where_most_is_free() -> None:
    plan = on(CLUSTER, DataParallel(devices=3), num_envs=6)
    assert sorted(nodes(plan).values()) == ["a", "b", "c"]
    plan = on(CLUSTER, ActorLearner(actors=4))
    assert nodes(plan) == {
        **{"learner": "a", "actor-0": "a", "actor-1": "b"},
        **{"actor-2": "a", "actor-3": "b"},
    }


def test_what_is_rare_is_left_to_those_who_ask_for_it() -> None:
    rich = (Node("gpu", "g" * 8, 64, 4), Node("odd", "o" * 8, 32, 0, (("disk", 1),)), NODES[2])
    plan = on(Cluster(rich, learners=Needs(gpus=1)), ActorLearner(actors=2))
    assert nodes(plan) == {"learner": "gpu", "actor-0": "c", "actor-1": "c"}
    plan = on(Cluster(rich, actors=Needs(others=(("disk", 0.5),))), ActorLearner(actors=2))
    assert nodes(plan) == {"learner": "c", "actor-0": "odd", "actor-1": "odd"}


def test_nodes_and_numbers_can_be_asked_for() -> None:
    cluster = replace(CLUSTER, learners=Needs(nodes=("c",)), actors=Needs(nodes=("bbb", "c")))
    found = nodes(on(cluster, ActorLearner(actors=3), num_envs=6))
    assert found == {"learner": "c", "actor-0": "b", "actor-1": "b", "actor-2": "b"}
    once = replace(CLUSTER, actors=Needs(per_node=1))
    assert set(nodes(on(once, ActorLearner(actors=3), num_envs=6)).values()) == {"a", "b", "c"}
    with pytest.raises(UserError, match="no room for actor-3"):
        on(once, ActorLearner(actors=4))
    with pytest.raises(UserError, match="The cluster has no node 'd'"):
        on(replace(CLUSTER, actors=Needs(nodes=("d",))), ActorLearner())


def test_no_room_is_told_with_what_there_is() -> None:
    sentence = (
        r"no room for actor-8, which needs 1 CPUs: the plan's 11 processes need 11 CPUs, and there "
        r"is free: 4 CPUs on a; 3 CPUs on b; 2 CPUs on c\. Ask for fewer actors"
    )
    with pytest.raises(UserError, match=sentence):
        on(CLUSTER, ActorLearner(actors=10), num_envs=10)


def test_actors_beyond_the_fewest_may_have_no_place_yet() -> None:
    plan = on(CLUSTER, ActorLearner(actors=10, min_actors=2), num_envs=20)
    assert list(nodes(plan).values()).count("") == 2
    assert "begins with 2 actors; others join as room is found" in plan.notes
    with pytest.raises(UserError, match="no room for actor-1"):
        on(Cluster(NODES[2:]), ActorLearner(actors=10, min_actors=2), num_envs=20)
    with pytest.raises(UserError, match="every update waits for all of them"):
        on(CLUSTER, ActorLearner(actors=2, min_actors=1, staleness=0))
    with pytest.raises(UserError, match=r"\(1\.\.2\) need a cluster: add --cluster"):
        planned(ActorLearner(actors=2, min_actors=1), Patient(), HOST)
    with pytest.raises(UserError, match=r"--actors 3\.\.2 is no range"):
        ActorLearner(actors=2, min_actors=3)


def test_a_part_counts_its_own_environments_and_all_devices() -> None:
    whole = on(CLUSTER, SplitDevices(actor_devices=2, learner_devices=2, threads=1))
    part = part_of(whole, 1)
    assert (part.num_envs, part.actors, part.joined, part.replicas) == (4, 1, 1, 2)
    assert [worker.name for worker in part.workers] == ["learner", "actor-1"]
    assert part.worker("learner").devices == (0, 1)
    assert part.worker("actor-1").devices == (0,)
    assert {i.envs for i in part.instances} == {None, (0, 4)}


def test_a_plan_on_a_cluster_is_data_and_can_be_read() -> None:
    plan, graph = planned(ActorLearner(actors=2), env=HOST, machine=Resources(4, 4, CLUSTER))
    assert serial.from_json(serial.to_json(plan)) == plan
    told = text(plan, graph)
    assert "  learner  learner  a     1 CPU" in told
    assert "object store" in told
    assert "each where most is free" in told
