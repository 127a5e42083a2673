"""For the same seed, every policy computes what the interpreter computes."""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from toys import (
    ActorGradients,
    Drift,
    RecurrentToy,
    Toy,
    TwoUnrolls,
    drift_actor,
    drift_step,
    drift_task,
    leaves_close,
    with_iteration,
)

from dovetail.algorithm import RL
from dovetail.envs.resolve import resolve
from dovetail.graph.interpret import interpret
from dovetail.planning import plan_for
from dovetail.policies.fused import Fused
from dovetail.policies.interface import Policy
from dovetail.policies.local import Local
from dovetail.runtime.local import Runtime

ENVS, ITERATIONS = 8, 4
ALGORITHMS = {kind.__name__: kind() for kind in (Toy, RecurrentToy, TwoUnrolls, ActorGradients)}
POLICIES = {
    "fused": Fused(envs=ENVS),
    "fused on 4 devices": Fused(envs=ENVS, devices=4),
    "local": Local(envs=ENVS),
}


@cache
def interpreted(name: str) -> tuple[Any, dict[str, float], Any, list[np.ndarray]]:
    """State, metrics summed over iterations, actors, and episodes summed over iterations."""
    algorithm = ALGORITHMS[name].bind(drift_task(ENVS))
    state, actor = algorithm.init(jax.random.key(7)), drift_actor(algorithm, ENVS)
    sums: dict[str, float] = {}
    ended: list[np.ndarray] = []
    for _ in range(ITERATIONS):
        state, metrics, actor, episodes = interpret(algorithm, drift_step, state, actor)
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in metrics.items()}
        ended = [a + np.asarray(b) for a, b in zip(ended or [0] * 3, episodes, strict=True)]
    return state, sums, actor, ended


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_policy_equals_the_interpreter(name: str, policy: str) -> None:
    run_and_compare(name, POLICIES[policy])


def run_and_compare(name: str, policy: Policy) -> None:
    algorithm = ALGORITHMS[name].bind(drift_task(ENVS))
    planned = plan_for(ALGORITHMS[name], resolve(Drift()), policy, 1000)
    runtime = Runtime(planned.graph, planned.plan, Drift())
    runtime.load(algorithm.init(jax.random.key(7)), drift_actor(algorithm, ENVS))
    reports = [runtime.advance(1), runtime.advance(ITERATIONS - 1)]
    state, metrics, actor, episodes = interpreted(name)
    leaves_close(runtime.state, state)
    leaves_close(runtime.actor, actor)
    ended = [sum(np.asarray(report.episodes[i]) for report in reports) for i in range(3)]
    leaves_close(ended, episodes)
    for metric, value in metrics.items():
        found = sum(float(report.metrics[metric]) for report in reports)
        assert found == pytest.approx(value, rel=1e-4, abs=1e-5)


def test_the_comparison_sees_episodes_end() -> None:
    *_, (count, returns, lengths) = interpreted("RecurrentToy")
    assert count.sum() > 3
    assert lengths.sum() > count.sum()
    assert np.abs(returns).sum() > 0


def test_a_host_environment_steps_in_the_local_policy() -> None:
    env = resolve("gymnasium:CartPole-v1")
    assert env.host is not None
    planned = plan_for(Toy(), env, Local(envs=2), 1000)
    host = env.host(2)
    try:
        runtime = Runtime(planned.graph, planned.plan, host)
        algorithm = Toy().bind(drift_task(2))
        observation = host.reset([1, 2])
        actor = drift_actor(algorithm, 2)
        timestep = actor.timestep._replace(observation=observation)
        runtime.load(algorithm.init(jax.random.key(0)), actor._replace(env=(), timestep=timestep))
        report = runtime.advance(3)
    finally:
        host.close()
    assert int(runtime.state.updates) == 3
    assert list(np.asarray(runtime.actor.step)) == [9, 9]
    assert np.isfinite(float(report.metrics["loss"]))


def advanced(iteration: Any, iterations: int) -> dict[str, float]:
    """The metrics' sums after some iterations under the local policy."""
    algorithm = with_iteration(iteration)
    planned = plan_for(algorithm, resolve(Drift()), Local(envs=ENVS), 1000)
    runtime = Runtime(planned.graph, planned.plan, Drift())
    bound = algorithm.bind(drift_task(ENVS))
    runtime.load(bound.init(jax.random.key(0)), drift_actor(bound, ENVS))
    return {name: float(x) for name, x in runtime.advance(iterations).metrics.items()}


def test_the_local_policy_leaves_bootstraps_zero_where_nothing_was_cut() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        trajectory = rl.unroll(self.act, rl.broadcast(state.params), 5, bootstrap=self.value)
        batch = rl.gather(trajectory)
        stale = (batch.bootstrap[:-1] != 0) & ~batch.truncated[:-1]
        return state, {"stale": stale.sum(), "truncated": batch.truncated.sum()}

    metrics = advanced(iteration, 6)  # buffers are used again after two
    assert metrics["truncated"] > 3
    assert metrics["stale"] == 0


def test_the_local_policy_skips_a_bootstrap_that_nobody_reads() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        trajectory = rl.unroll(self.act, rl.broadcast(state.params), 5, bootstrap=self.value)
        return state, {"steps": rl.gather(trajectory.valid).sum()}

    assert advanced(iteration, 2) == {"steps": 2 * 5 * ENVS}
