"""The one-machine runtime: what it reports, and that how it is called changes nothing."""

import threading
from typing import Any

import jax
import numpy as np
import pytest
from small import LENGTH, Started, a2c, numbers
from toys import Drift, RecurrentToy, Toy, TwoUnrolls

from dovetail.algorithm import Algorithm
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

ENVS = 4
SYNCHRONOUS: dict[str, Strategy] = {
    "fused": Fused(),
    "local": Local(),
    "actor-learner": ActorLearner(staleness=0),
    "central-inference": CentralInference(workers=2, processes=False),
    "data-parallel": DataParallel(),
    "split-devices": SplitDevices(staleness=0),
    "environments": Environments(processes=False),
}


def started(algorithm: Algorithm, strategy: Strategy, env: Any = None, **more: Any) -> Started:
    return Started(algorithm, env or Drift(), strategy, seed=1, **more)


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_many_iterations_at_once_are_the_same_as_one_by_one(strategy: str) -> None:
    with started(RecurrentToy(num_envs=ENVS), SYNCHRONOUS[strategy]) as at_once:
        sums = at_once.advance(5)
    with started(RecurrentToy(num_envs=ENVS), SYNCHRONOUS[strategy]) as one_by_one:
        reports = [one_by_one.advance(1) for _ in range(5)]
    np.testing.assert_array_equal(numbers(at_once.state), numbers(one_by_one.state))
    np.testing.assert_array_equal(numbers(at_once.actor), numbers(one_by_one.actor))
    assert sums.iterations == 5
    total = sum(float(report.metrics["loss"]) for report in reports)
    assert float(sums.metrics["loss"]) == pytest.approx(total, rel=1e-5)
    for i in range(3):
        each = np.sum([np.asarray(report.episodes[i]) for report in reports], axis=0)
        np.testing.assert_allclose(np.asarray(sums.episodes[i]), each, rtol=1e-5)
    assert np.asarray(sums.episodes[0]).sum() > 0


@pytest.mark.parametrize(
    "algorithm", [TwoUnrolls(num_envs=ENVS), Toy(num_envs=ENVS)], ids=["two unrolls", "one"]
)
def test_local_is_fused(algorithm: Algorithm) -> None:
    with started(algorithm, Fused()) as fused, started(algorithm, Local()) as local:
        theirs, ours = fused.advance(4), local.advance(4)
    np.testing.assert_allclose(numbers(local.state), numbers(fused.state), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(numbers(local.actor), numbers(fused.actor), rtol=1e-5, atol=1e-5)
    for found, expected in zip(ours.episodes, theirs.episodes, strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5)


@pytest.mark.parametrize(
    "strategy",
    [Fused(devices=4), SplitDevices(actor_devices=2, learner_devices=2, threads=1, staleness=0)],
    ids=["fused", "split"],
)
def test_metrics_are_means_over_devices(strategy: Strategy) -> None:
    with started(Toy(num_envs=ENVS), Fused()) as one, started(Toy(num_envs=ENVS), strategy) as many:
        expected, found = one.advance(3), many.advance(3)
    assert many.plan.replicas > 1
    assert float(found.metrics["loss"]) == pytest.approx(float(expected.metrics["loss"]), rel=1e-4)
    np.testing.assert_allclose(
        np.asarray(found.episodes[1]), np.asarray(expected.episodes[1]), rtol=1e-5
    )


def test_seeds_have_an_axis_of_their_own() -> None:
    with (
        started(Toy(num_envs=ENVS), Fused(), seeds=3) as several,
        started(Toy(num_envs=ENVS), Fused()) as alone,
    ):
        report = several.advance(2)
        alone.advance(2)  # the same first seed
    assert np.shape(report.metrics["loss"]) == (3,)
    assert [np.shape(leaf) for leaf in report.episodes] == [(3, ENVS)] * 3
    assert {leaf.shape[0] for leaf in jax.tree.leaves(several.state)} == {3}
    first = jax.tree.map(lambda leaf: leaf[0], several.state)
    np.testing.assert_allclose(numbers(first), numbers(alone.state), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["local", "actor-learner", "central-inference"])
def test_what_was_handed_out_does_not_change_afterwards(strategy: str) -> None:
    """The host's buffers are used again; a snapshot between two iterations must not see it."""
    env = "gymnasium:CartPole-v1?vectorization=sync"
    with started(a2c(num_envs=ENVS), SYNCHRONOUS[strategy], env) as running:
        running.advance(2)
        state, actor = running.state, running.actor
        before = numbers(state), numbers(actor)
        for _ in range(3):
            running.advance(1)
        np.testing.assert_array_equal(numbers(state), before[0])
        np.testing.assert_array_equal(numbers(actor), before[1])
        assert not np.array_equal(numbers(running.actor), before[1])


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_loading_a_snapshot_goes_back_to_it(strategy: str) -> None:
    chosen = SYNCHRONOUS[strategy]
    with started(Toy(num_envs=ENVS), chosen) as first:
        first.advance(1)
        snapshot = first.state, first.actor
        first.advance(3)
    with started(Toy(num_envs=ENVS), chosen, start=snapshot) as again:
        np.testing.assert_array_equal(numbers(again.actor), numbers(snapshot[1]))
        again.advance(3)
    np.testing.assert_array_equal(numbers(again.state), numbers(first.state))
    np.testing.assert_array_equal(numbers(again.actor), numbers(first.actor))


def test_time_is_told_by_fragment() -> None:
    with started(a2c(num_envs=ENVS), Local()) as local:
        assert set(local.runtime.seconds.values()) == {0.0}
        local.advance(2)
        spent = local.runtime.seconds
        assert {"unroll.act", "unroll.step"} <= spent.keys() and min(spent.values()) > 0
        local.advance(1)
        assert all(local.runtime.seconds[name] > before for name, before in spent.items())
        assert local.runtime.compile_seconds > 0
    with started(a2c(num_envs=ENVS), Fused()) as fused:
        assert fused.runtime.compile_seconds > 0


def test_workers_tell_how_long_they_waited() -> None:
    with started(a2c(num_envs=ENVS), ActorLearner(staleness=0)) as running:
        running.advance(3)
        spent = running.runtime.seconds
    waits = {name for name in spent if name.startswith("wait_")}
    assert waits == {"wait_learner", "wait_actor-0", "wait_actor-1"}
    assert min(spent[name] for name in waits) > 0 and spent["learner"] > 0


def test_steps_are_counted_by_environment() -> None:
    with started(a2c(num_envs=ENVS), Fused()) as running:
        running.advance(3)
        assert np.asarray(running.actor.step).tolist() == [3 * LENGTH] * ENVS
        assert running.graph.steps_per_iteration == LENGTH * ENVS


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_closing_ends_its_threads_and_may_be_done_twice(strategy: str) -> None:
    before = set(threading.enumerate())
    with started(Toy(num_envs=ENVS), SYNCHRONOUS[strategy]) as running:
        running.advance(1)
    running.runtime.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert not set(threading.enumerate()) - before
