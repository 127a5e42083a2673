"""The one-machine runtime: what it reports, and that how it is called changes nothing."""

from typing import Any

import jax
import numpy as np
import pytest
from small import LENGTH, a2c, numbers, runtime_of
from toys import Drift, RecurrentToy, Toy, TwoUnrolls

from dovetail.algorithm import Algorithm, Task
from dovetail.envs.resolve import resolve
from dovetail.policies.fused import Fused
from dovetail.policies.interface import Policy
from dovetail.policies.local import Local
from dovetail.runtime.local import Runtime
from dovetail.training.start import first_state

ENVS = 4


def started(algorithm: Algorithm, policy: Policy, env: Any = None, seeds: int = 1) -> Runtime:
    env = env or Drift()
    runtime = runtime_of(algorithm, env, policy, seeds=seeds)
    bound = algorithm.bind(Task(env.spec, policy.envs, 1000))
    runtime.load(*first_state(bound, env, policy.envs, seed=1, seeds=seeds))
    return runtime


@pytest.mark.parametrize("policy", [Fused(ENVS), Local(ENVS)], ids=["fused", "local"])
def test_many_iterations_at_once_are_the_same_as_one_by_one(policy: Policy) -> None:
    at_once, one_by_one = started(RecurrentToy(), policy), started(RecurrentToy(), policy)
    sums = at_once.advance(5)
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


@pytest.mark.parametrize("algorithm", [TwoUnrolls(), Toy()], ids=["two unrolls", "one"])
def test_local_is_fused(algorithm: Algorithm) -> None:
    fused, local = started(algorithm, Fused(ENVS)), started(algorithm, Local(ENVS))
    theirs, ours = fused.advance(4), local.advance(4)
    np.testing.assert_allclose(numbers(local.state), numbers(fused.state), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(numbers(local.actor), numbers(fused.actor), rtol=1e-5, atol=1e-5)
    for found, expected in zip(ours.episodes, theirs.episodes, strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5)


def test_metrics_are_means_over_devices() -> None:
    one, four = started(Toy(), Fused(ENVS)), started(Toy(), Fused(ENVS, devices=4))
    expected, found = one.advance(3), four.advance(3)
    assert float(found.metrics["loss"]) == pytest.approx(float(expected.metrics["loss"]), rel=1e-4)
    np.testing.assert_allclose(
        np.asarray(found.episodes[1]), np.asarray(expected.episodes[1]), rtol=1e-5
    )


def test_seeds_have_an_axis_of_their_own() -> None:
    runtime = started(Toy(), Fused(ENVS), seeds=3)
    report = runtime.advance(2)
    assert np.shape(report.metrics["loss"]) == (3,)
    assert [np.shape(leaf) for leaf in report.episodes] == [(3, ENVS)] * 3
    assert {leaf.shape[0] for leaf in jax.tree.leaves(runtime.state)} == {3}
    alone = started(Toy(), Fused(ENVS))  # the same first seed
    alone.advance(2)
    first = jax.tree.map(lambda leaf: leaf[0], runtime.state)
    np.testing.assert_allclose(numbers(first), numbers(alone.state), rtol=1e-5, atol=1e-6)


def test_what_was_handed_out_does_not_change_afterwards() -> None:
    """The host's buffers are used again; a snapshot between two iterations must not see it."""
    found = resolve("gymnasium:CartPole-v1")
    assert found.host is not None
    env = found.host(ENVS)
    runtime = started(a2c(), Local(ENVS), env)
    runtime.advance(2)
    state, actor = runtime.state, runtime.actor
    before = numbers(state), numbers(actor)
    for _ in range(3):
        runtime.advance(1)
    np.testing.assert_array_equal(numbers(state), before[0])
    np.testing.assert_array_equal(numbers(actor), before[1])
    assert not np.array_equal(numbers(runtime.actor), before[1])
    env.close()


def test_loading_a_snapshot_goes_back_to_it() -> None:
    for policy in (Fused(ENVS), Local(ENVS)):
        runtime = started(Toy(), policy)
        runtime.advance(1)
        state, actor = runtime.state, runtime.actor
        runtime.advance(3)
        expected = numbers(runtime.state), numbers(runtime.actor)
        again = runtime_of(Toy(), Drift(), policy)
        again.load(state, actor)
        again.advance(3)
        np.testing.assert_array_equal(numbers(again.state), expected[0])
        np.testing.assert_array_equal(numbers(again.actor), expected[1])


def test_time_is_told_by_fragment() -> None:
    local, fused = started(a2c(), Local(ENVS)), started(a2c(), Fused(ENVS))
    assert set(local.seconds.values()) == {0.0}
    local.advance(2)
    spent = local.seconds
    assert {"unroll.act", "unroll.step"} <= spent.keys() and min(spent.values()) > 0
    local.advance(1)
    assert all(local.seconds[name] > before for name, before in spent.items())
    assert local.compile_seconds > 0 and fused.compile_seconds > 0
    assert fused.asynchronous and not local.asynchronous


def test_steps_are_counted_by_environment() -> None:
    runtime = started(a2c(), Fused(ENVS))
    runtime.advance(3)
    assert np.asarray(runtime.actor.step).tolist() == [3 * LENGTH] * ENVS
    assert runtime.graph.steps_per_iteration == LENGTH * ENVS
