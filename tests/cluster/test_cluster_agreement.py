"""On a cluster of three nodes every synchronous strategy computes what the interpreter computes."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agreement import (
    ALGORITHMS,
    CARTPOLE,
    ENVS,
    HOST,
    SEED,
    UPDATES,
    advance_and_compare,
    assert_agrees,
    assert_close,
)
from links import assert_links_are_the_plans
from nodes import Nodes, OnCluster, processes_of
from recorded_control import record_controls
from safetensors.numpy import load
from small import LENGTH, QUIET, Started
from toys import Drift, TwoUnrolls
from waiting import eventually

import dovetail
from dovetail.algorithms import BC, ApeX
from dovetail.errors import UserError
from dovetail.evaluation.export import read_exported
from dovetail.hosts.deployment import Deployment, ProcessShare
from dovetail.loading import load_object
from dovetail.plan.ir import LinkKind
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
from dovetail.strategies.interface import Strategy
from dovetail.training import dataset as recorded

HALF = ProcessShare(cpus=0.5)
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "critic_apart.py"
CRITIC: Any = load_object(f"{EXAMPLE}:CriticApart", "algorithm")(unroll_length=4, hidden=8)
CASES: dict[str, tuple[str, str, Strategy, int]] = {
    "4 actors": ("impala", CARTPOLE, ActorLearner(actors=4, staleness=0), 5),
    "actors with processes": (
        "ppo-recurrent",
        HOST,
        ActorLearner(actors=2, staleness=0, processes=True),
        3,
    ),
    "inference": ("impala", HOST, CentralInference(workers=2), 2),
    "2 learners, compiled": ("impala", CARTPOLE, DataParallel(devices=2), 2),
    "2 learners apart from actors": (
        "ppo",
        HOST,
        SplitDevices(actor_devices=1, learner_devices=2, staleness=0),
        4,
    ),
    "environments": ("ppo", HOST, Environments(), 1),
    "parameter server": ("a3c", HOST, ParameterServer(synchronous=True), 3),
    "local": ("a3c", HOST, Local(), 1),
    "fused": ("ppo", CARTPOLE, Fused(), 1),
}
"""Algorithm, environment, strategy, and how many processes that makes. The tests below compare
further strategies: on a cluster most of a test's time is the start of its processes."""


@pytest.mark.parametrize("case", CASES)
def test_a_cluster_equals_the_interpreter(nodes: Nodes, case: str) -> None:
    algorithm, env, strategy, processes = CASES[case]
    where = Deployment(nodes.address, HALF, HALF)
    with OnCluster(ALGORITHMS[algorithm], env, strategy, where, seed=SEED) as running:
        assert len(running.plan.processes) == processes
        advance_and_compare(running, algorithm, env)


LINKED: dict[str, Strategy] = {
    "learner and actors": ActorLearner(actors=2, staleness=0, sides=("critic",)),
    "replicas": DataParallel(devices=1, sides=("critic",)),
}


@pytest.mark.parametrize("case", LINKED)
def test_a_side_of_ones_own_on_a_node_of_its_own(nodes: Nodes, case: str) -> None:
    """It computes what one machine computes, over the links that the plan prints."""
    where = Deployment(nodes.address, HALF, HALF)
    with OnCluster(CRITIC, CARTPOLE, LINKED[case], where, seed=SEED) as running:
        report = running.advance(2)
    [process] = [s for s in running.plan.processes if s.workers == ("critic",)]
    assert process.node
    assert_links_are_the_plans(running.plan, running.graph, report, 2)
    with Started(CRITIC, CARTPOLE, Local(), seed=SEED) as expected:
        expected.advance(2)
    assert_close(running.state, expected.state)


def test_two_shards_equal_the_interpreter_and_inserts_go_straight_to_them(nodes: Nodes) -> None:
    strategy = ActorLearner(actors=4, staleness=0, shards=2)
    algorithm, where = "dqn-prioritized", Deployment(nodes.address, HALF, HALF)
    with OnCluster(ALGORITHMS[algorithm], HOST, strategy, where, seed=SEED) as running:
        assert len(running.plan.processes) == 7
        report = running.advance(2)
        running.advance(UPDATES - 2)
        assert_agrees(running, algorithm, HOST)
    assert_links_are_the_plans(running.plan, running.graph, report, 2)
    assert not [span for span in report.spans["learner"] if span.name == "insert"]


def test_learning_from_recorded_data(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts that are brought to the learner one after the other."""
    monkeypatch.setattr(recorded, "MEGABYTE", 1000)
    _, pendulum = record_controls(tmp_path / "recorded")
    algorithm = BC(hidden_sizes=(8,), batch_size=8, gradient_steps=2)
    weights: list[bytes] = []
    for name, cluster in (("nodes", Deployment(nodes.address, HALF, HALF)), ("here", None)):
        run = dovetail.train(
            *(algorithm, "Pendulum-v1", Local()),
            total_steps=40,
            seed=SEED,
            data=pendulum,
            data_memory=1,
            cluster=cluster,
            settings=replace(QUIET, folder=str(tmp_path / name)),
        )
        weights.append(read_exported(run.path / "policy" / "last").weights)
    assert_close(*(_floats(found) for found in weights))


def test_what_crosses_nodes_goes_through_the_object_store(nodes: Nodes) -> None:
    strategy = ActorLearner(actors=2, staleness=0, processes=True)
    where = Deployment(nodes.address, HALF, HALF)
    plan = dovetail.explain(ALGORITHMS["ppo"], HOST, strategy, where).plan
    kinds = {link.boundary: link.kind for link in plan.links}
    assert kinds["broadcast"] is kinds["gather"] is LinkKind.OBJECT_STORE
    assert kinds["action"] is kinds["observation"] is LinkKind.SHARED_MEMORY


def test_actors_that_hear_from_the_learner_in_the_middle_of_an_iteration(nodes: Nodes) -> None:
    """The toys' own files reach the workers, and every chain of an iteration is a call."""
    strategy = ActorLearner(actors=2, staleness=0)
    where = Deployment(nodes.address, HALF, HALF)
    with OnCluster(TwoUnrolls(num_envs=4), Drift(), strategy, where) as running:
        running.advance(3)
    with Started(TwoUnrolls(num_envs=4), Drift(), Local()) as expected:
        expected.advance(3)
    assert_close(running.state, expected.state)
    assert_close(running.actor, expected.actor)


def test_two_learners_on_different_nodes_equal_the_interpreter(nodes: Nodes) -> None:
    """And states are kept for whoever holds their report, as an evaluation does that takes longer
    than many reports."""
    strategy = DataParallel(devices=2)
    where = Deployment(nodes.address)
    with OnCluster(ALGORITHMS["ppo"], HOST, strategy, where, seed=SEED) as running:
        planned = {process.node for process in running.plan.processes}
        first = running.runtime.advance(1).wait()
        found = set(running.cluster.where)
        running.advance(UPDATES - 1)
        assert_agrees(running, "ppo", HOST)
        for _ in range(5):
            running.runtime.advance(1).wait()
        state, actor = first.state(), first.actor()
        with pytest.raises(UserError, match=f"after update {UPDATES + 1} is not kept"):
            running.cluster.states(UPDATES + 1)
    assert len(running.plan.processes) == len(planned) == len(found) == 2
    with Started(ALGORITHMS["ppo"], HOST, Local(), seed=SEED) as expected:
        expected.advance(1)
    assert_close(state, expected.state)
    assert_close(actor, expected.actor)


def test_two_actors_equal_the_interpreter_and_report_on_the_drivers_clock(nodes: Nodes) -> None:
    strategy = ActorLearner(actors=2, staleness=0)
    where = Deployment(nodes.address, HALF, HALF)
    with OnCluster(ALGORITHMS["ppo"], HOST, strategy, where, seed=SEED) as running:
        assert len(running.plan.processes) == 3
        advance_and_compare(running, "ppo", HOST)
        began = time.perf_counter()
        report = running.advance(5)
        ended = time.perf_counter()
    for worker in ("actor-0", "actor-1"):
        steps = [span for span in report.spans[worker] if span.name == "unroll.step"]
        assert len(steps) == 5
        assert all(began - 0.05 <= span.start <= ended + 0.05 for span in steps)
    assert sum(span.name == "learner" for span in report.spans["learner"]) == 5


def test_actors_insert_into_servers_on_nodes(nodes: Nodes, tmp_path: Path) -> None:
    """Over TCP, each into its own shard; what is learned is what one machine learns."""
    where = Deployment(nodes.address, HALF, HALF)
    strategy = ActorLearner(actors=2, staleness=0)
    weights: list[bytes] = []
    for name, cluster in (("nodes", where), ("here", None)):
        run = dovetail.train(
            *(ALGORITHMS["dqn-prioritized"], HOST, strategy),
            total_steps=UPDATES * LENGTH * ENVS,
            seed=SEED,
            cluster=cluster,
            replay=dovetail.ServedReplay(shards=2),
            settings=replace(QUIET, folder=str(tmp_path / name)),
        )
        weights.append(read_exported(run.path / "policy" / "last").weights)
        assert run.summary["env_steps"] == UPDATES * LENGTH * ENVS
    assert (tmp_path / "nodes" / "replay" / "key").stat().st_mode & 0o777 == 0o600
    assert_close(*(_floats(found) for found in weights))
    assert eventually(lambda: not processes_of("ray::ServerOnNode"))


def _floats(weights: bytes) -> np.ndarray:
    found = [array.ravel() for _, array in sorted(load(weights).items())]
    return np.concatenate(found).astype(np.float64)


@pytest.mark.slow
def test_four_actors_and_two_shards_learn(optimized_nodes: Nodes, tmp_path: Path) -> None:
    """A random policy returns 20. The same job solves the task on one machine, in another test."""
    settings = replace(
        QUIET, folder=str(tmp_path / "run"), evaluate_every=2, episodes=20, until=150
    )
    run = dovetail.train(
        ApeX(unroll_length=16, gradient_steps=96),
        "CartPole-v1",
        ActorLearner(actors=4, shards=2, processes=False),
        total_steps=300_000,
        cluster=Deployment(optimized_nodes.address, HALF, HALF),
        settings=settings,
    )
    assert run.summary["final_return"] >= 150
    assert 0 < run.metrics["staleness_max"].max() <= 2
