"""For the same seed, every synchronous strategy computes what the interpreter computes."""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from small import Started
from toys import (
    ActorGradients,
    Drift,
    RecurrentToy,
    Toy,
    TwoUnrolls,
    drift_step,
    drift_task,
    leaves_close,
    with_iteration,
)

from dovetail.algorithm import RL
from dovetail.graph.interpret import interpret
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
from dovetail.training.start import first_state

ENVS, ITERATIONS, SEED = 8, 4, 7
ALGORITHMS = {kind.__name__: kind() for kind in (Toy, RecurrentToy, TwoUnrolls, ActorGradients)}
STRATEGIES: dict[str, Strategy] = {
    "fused": Fused(),
    "fused on 4 devices": Fused(devices=4),
    "local": Local(),
    "1 actor": ActorLearner(actors=1, staleness=0),
    "2 actors": ActorLearner(actors=2, staleness=0),
    "4 actors": ActorLearner(actors=4, staleness=0),
    "inference, half at a time": CentralInference(workers=4),
    "inference, one at a time": CentralInference(workers=4, batch=2),
    "inference, all at a time": CentralInference(workers=2, batch=8),
    "2 replicas": DataParallel(devices=2),
    "4 replicas": DataParallel(devices=4),
    "split devices": SplitDevices(staleness=0),
    "split devices, 2 and 2": SplitDevices(
        actor_devices=2, learner_devices=2, threads=2, staleness=0
    ),
    "environments": Environments(workers=4),
    "parameter server": ParameterServer(workers=4, synchronous=True),
}
CASES = {
    "Toy": ("fused", "fused on 4 devices", "local"),
    "RecurrentToy": tuple(STRATEGIES)[:-1],
    "TwoUnrolls": tuple(name for name in STRATEGIES if name[1:] != " replicas")[:-1],
    "ActorGradients": ("fused", "fused on 4 devices", "local", "4 actors", "parameter server"),
}


@cache
def interpreted(name: str) -> tuple[Any, dict[str, float], Any, list[np.ndarray]]:
    """State, metrics summed over iterations, actors, and episodes summed over iterations."""
    algorithm = ALGORITHMS[name].bind(drift_task(ENVS))
    state, actor = first_state(algorithm, Drift(), ENVS, SEED)
    sums: dict[str, float] = {}
    ended: list[np.ndarray] = []
    iteration = jax.jit(lambda state, actor: interpret(algorithm, drift_step, state, actor))
    for _ in range(ITERATIONS):
        state, metrics, actor, episodes = iteration(state, actor)
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in metrics.items()}
        ended = [a + np.asarray(b) for a, b in zip(ended or [0] * 3, episodes[:3], strict=True)]
    return state, sums, actor, ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"), [(name, strategy) for name, cases in CASES.items() for strategy in cases]
)
def test_a_strategy_equals_the_interpreter(name: str, strategy: str) -> None:
    with Started(ALGORITHMS[name], Drift(), STRATEGIES[strategy], seed=SEED) as running:
        reports = [running.advance(1), running.advance(ITERATIONS - 1)]
    state, metrics, actor, episodes = interpreted(name)
    leaves_close(running.state, state)
    leaves_close(running.actor, actor)
    ended = [sum(np.asarray(report.episodes[i]) for report in reports) for i in range(3)]
    leaves_close(ended, episodes)
    for metric, value in metrics.items():
        found = sum(float(report.metrics[metric]) for report in reports)
        assert found == pytest.approx(value, rel=1e-4, abs=1e-5)
    assert reports[-1].measures.get("staleness_max", 0) == 0
    assert reports[-1].measures.get("dropped", 0) == 0


def test_the_comparison_sees_episodes_end() -> None:
    *_, (count, returns, lengths) = interpreted("RecurrentToy")
    assert count.sum() > 3
    assert lengths.sum() > count.sum()
    assert np.abs(returns).sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["local", "2 actors", "inference, half at a time"])
def test_a_host_environment_steps_as_often_as_it_should(strategy: str) -> None:
    env = "gymnasium:CartPole-v1?vectorization=sync"
    with Started(Toy(), env, STRATEGIES[strategy]) as running:
        report = running.advance(3)
    assert int(running.state.updates) == 3
    assert list(np.asarray(running.actor.step)) == [9] * ENVS
    assert np.isfinite(float(report.metrics["loss"]))


def advanced(iteration: Any, iterations: int, strategy: str) -> dict[str, float]:
    """The metrics' sums after some iterations."""
    with Started(with_iteration(iteration), Drift(), STRATEGIES[strategy]) as running:
        return {name: float(x) for name, x in running.advance(iterations).metrics.items()}


ON_THE_HOST = pytest.mark.parametrize("strategy", ["local", "inference, half at a time"])
"""Both ways of stepping environments outside the compiled program."""


@ON_THE_HOST
def test_bootstraps_are_zero_where_nothing_was_cut(strategy: str) -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        trajectory = rl.unroll(self.act, rl.broadcast(state.params), 5, bootstrap=self.value)
        batch = rl.gather(trajectory)
        stale = (batch.bootstrap[:-1] != 0) & ~batch.truncated[:-1]
        return state, {"stale": stale.sum(), "truncated": batch.truncated.sum()}

    metrics = advanced(iteration, 6, strategy)  # buffers are used again after two
    assert metrics["truncated"] > 3
    assert metrics["stale"] == 0


@ON_THE_HOST
def test_a_bootstrap_that_nobody_reads_is_skipped(strategy: str) -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        trajectory = rl.unroll(self.act, rl.broadcast(state.params), 5, bootstrap=self.value)
        return state, {"steps": rl.gather(trajectory.valid).sum()}

    assert advanced(iteration, 2, strategy) == {"steps": 2 * 5 * ENVS}
