"""Processes and nodes that die, hang, come and go while a run goes on."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agreement import ENVS
from nodes import Nodes, OnCluster, fresh_nodes, processes_of
from small import LENGTH, QUIET
from survival import GOES_ON, RESUMES, survives
from waiting import eventually

import dovetail
from dovetail.algorithms import DQN, IMPALA
from dovetail.errors import UserError
from dovetail.hosts.deployment import Deployment, ProcessShare
from dovetail.strategies import ActorLearner

IMPALA_SMALL = IMPALA(LENGTH, hidden_sizes=(8,))
HALF = ProcessShare(cpus=0.5)
ACTORS, LEARNER = "ray::ActorProcess", "ray::LearnerProcess"
REPLAYS = "ray::SideProcess"
COMMAND = [sys.executable, "-c", "from dovetail.cli.main import main; raise SystemExit(main())"]
FRAGILE = Path(__file__).parent.parent / "fragile.py"


def two_actors(**more: Any) -> ActorLearner:
    return ActorLearner(actors=2, staleness=2, **more)


def saved_updates(folder: Path) -> list[int]:
    """The updates of which a run has checkpoints."""
    saved = folder / "checkpoints"
    return [int(p.name) for p in saved.iterdir() if p.name.isdigit()] if saved.is_dir() else []


@survives("the process of an actor is killed", "actor-learner", "Ray", GOES_ON)
def test_an_actor_that_is_killed_is_replaced(nodes: Nodes) -> None:
    where = Deployment(nodes.address)
    with OnCluster(IMPALA_SMALL, "CartPole-v1", two_actors(), where) as running:
        running.advance(3)
        for process in processes_of(ACTORS):
            os.kill(process, signal.SIGKILL)
        report = running.advance(200)
        replaced = eventually(lambda: len(processes_of(ACTORS)) == 2)
    assert replaced
    assert report.measures["restarts"] == 2
    assert 1 <= report.measures["lost_unrolls"] <= 2
    gone = [line for line in running.told if "was killed" in line]
    assert {line.split()[0] for line in gone} == {"actor-0", "actor-1"}
    assert report.measures["staleness_max"] <= 2


@survives(
    "the process of a replay is killed",
    "actor-learner",
    "Ray",
    GOES_ON + ", with the replay of the last checkpoint",
)
def test_a_replay_that_is_killed_comes_back_as_it_was_saved(nodes: Nodes) -> None:
    strategy = ActorLearner(actors=2, staleness=1, shards=2)
    dqn = DQN(LENGTH, batch_size=4, buffer_size=1024, learning_starts=1, hidden_sizes=(8,))
    with OnCluster(dqn, "CartPole-v1", strategy, Deployment(nodes.address, HALF, HALF)) as running:
        running.advance(10)
        saved = np.asarray(running.state.replay.state.counters.begun)  # as for a checkpoint
        assert saved.shape == (2, 4) and 30 < saved.min() <= saved.max() <= 10 * LENGTH
        for process in processes_of(REPLAYS):
            os.kill(process, signal.SIGKILL)
        running.advance(5)
        after = np.asarray(running.state.replay.state.counters.begun)
    lost = [line for line in running.told if "what came later is lost" in line]
    assert {line.split()[0] for line in lost} == {"replay-0", "replay-1"}
    assert (saved < after).all() and after.max() <= 15 * LENGTH


@survives("an environment blocks in step", "actor-learner", "Ray", GOES_ON)
def test_an_actor_that_hangs_is_replaced(nodes: Nodes, tmp_path: Path) -> None:
    env = f"{FRAGILE}:Fragile?how=sleep&at=30&marker={tmp_path / 'once'}"
    where = Deployment(nodes.address)
    with OnCluster(IMPALA_SMALL, env, two_actors(), where, patience=2.0) as running:
        eventually(lambda: running.advance(20).measures["restarts"] == 1)
    [complaint] = [line for line in running.told if "hangs" in line]
    assert "time.sleep" in complaint


def test_an_environment_that_raises_is_named_with_its_traceback(nodes: Nodes) -> None:
    env = f"{FRAGILE}:Fragile?how=raise&at=3"
    with (
        OnCluster(IMPALA_SMALL, env, two_actors(), Deployment(nodes.address)) as running,
        pytest.raises(UserError, match="actor-. failed.*the cart fell off"),
    ):
        running.advance(100)
    assert sum("set up again" in line for line in running.told) >= 5


@survives("a node of actors dies", "actor-learner", "Ray", GOES_ON)
def test_a_node_that_dies_is_replaced_and_one_that_comes_is_used() -> None:
    with fresh_nodes() as own:
        first, spare = own.add(resources={"actors": 2}), None
        actor = ProcessShare(resources={"actors": 1})
        where = Deployment(own.address, actor=actor)
        strategy = ActorLearner(actors=3, min_actors=2, staleness=2)
        with OnCluster(
            replace(IMPALA_SMALL, num_envs=12), "CartPole-v1", strategy, where
        ) as running:
            running.advance(5)
            assert [process.node for process in running.plan.processes].count("") == 1
            spare = own.add(num_cpus=3, resources={"actors": 3})
            eventually(lambda: running.advance(5) and "actor-2 has joined." in running.told)
            own.remove(first)
            eventually(lambda: running.advance(20).measures["restarts"] >= 2)
            eventually(lambda: len(processes_of(ACTORS)) == 3)
            assert running.advance(20).finite
    assert spare is not None
    gone = [line for line in running.told if "is gone" in line]
    assert {line.split()[0] for line in gone} >= {"actor-0", "actor-1"}


@survives("the learner dies", "any", "Ray", RESUMES)
def test_a_dead_learner_ends_the_run_and_names_the_checkpoint(nodes: Nodes, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def kill() -> None:
        eventually(lambda: saved_updates(folder), 60)
        for process in processes_of(LEARNER):
            os.kill(process, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    settings = replace(QUIET, folder=str(folder), checkpoint_every=0.5)
    with pytest.raises(UserError, match=r"The learner on .* is gone.*Update \d+ is saved: go on"):
        dovetail.train(
            IMPALA_SMALL,
            "CartPole-v1",
            two_actors(),
            total_steps=10**9,
            cluster=nodes.address,
            settings=settings,
        )
    killer.join()
    assert eventually(lambda: not processes_of(ACTORS) and not processes_of(LEARNER))
    reached = max(saved_updates(folder)) * ENVS * LENGTH
    resumed = dovetail.resume(folder, total_steps=reached + 1000)
    assert resumed.summary["env_steps"] >= reached + 1000


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_a_driver_that_ends(nodes: Nodes, tmp_path: Path, how: int) -> None:
    folder = tmp_path / "run"
    words = ["train", "impala", "--env", "CartPole-v1", "--strategy", "actor-learner"]
    words += ["--cluster", nodes.address, "--total-steps", "1_000_000_000", "--run", str(folder)]
    words += ["--hidden-sizes", "8", "--display", "plain", "--no-video", "--episodes", "2"]
    with subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True) as driver:
        assert driver.stderr is not None
        assert any("steps/s" in line for line in driver.stderr)
        assert processes_of(LEARNER) and len(processes_of(ACTORS)) == 2
        driver.send_signal(how)
        told = driver.stderr.read()
        ended = driver.wait(60)
    assert eventually(lambda: not processes_of(ACTORS) and not processes_of(LEARNER))
    if how is not signal.SIGKILL:
        assert ended == 128 + how
        assert "everything is saved" in told
        assert any((folder / "checkpoints").iterdir())


@survives("the head node dies", "any", "Ray", RESUMES)
def test_a_dead_head_ends_the_run_and_names_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with fresh_nodes() as own:
        words = ["train", "impala", "--env", "CartPole-v1", "--strategy", "actor-learner"]
        words += ["--cluster", own.address, "--total-steps", "1_000_000_000", "--run", str(folder)]
        words += ["--hidden-sizes", "8", "--display", "plain", "--no-video", "--episodes", "2"]
        words += ["--checkpoint-every", "0.5"]
        with subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True) as driver:
            saved = folder / "checkpoints"
            eventually(
                lambda: saved.is_dir() and any(p.name.isdigit() for p in saved.iterdir()), 90
            )
            [server] = own.ray.head_node.all_processes["gcs_server"]
            server.process.kill()
            assert driver.stderr is not None
            told = driver.stderr.read()
            ended = driver.wait(60)
    assert ended == 2, told
    assert "The head of the cluster" in told.splitlines()[-1]
    assert "is saved: go on with" in told.splitlines()[-1]


def test_a_learner_that_is_frozen_ends_the_run_after_its_patience(nodes: Nodes) -> None:
    where = Deployment(nodes.address)
    with OnCluster(IMPALA_SMALL, "CartPole-v1", two_actors(), where, patience=2.0) as running:
        running.advance(2)
        [learner] = processes_of(LEARNER)
        coming = running.runtime.advance(200)
        os.kill(learner, signal.SIGSTOP)
        try:
            with pytest.raises(UserError, match="A learner on .* has not answered for"):
                coming.wait()
        finally:
            os.kill(learner, signal.SIGCONT)
