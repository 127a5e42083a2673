"""How old the weights are that act: exactly as told, or at most, and what follows from it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from small import Started, numbers
from toys import ActorGradients, Drift, RecurrentToy, Toy, drift_step, drift_task, leaves_close

from dovetail.algorithm import Correction
from dovetail.graph.interpret import Interpreting
from dovetail.strategies import ActorLearner, CentralInference, ParameterServer, SplitDevices
from dovetail.strategies.interface import Strategy
from dovetail.training.start import first_state

ENVS, ITERATIONS, SEED = 8, 5, 2


@dataclass(frozen=True)
class Bearing(RecurrentToy):
    """Takes trajectories of any age."""

    correction = Correction("nothing", None)


@dataclass(frozen=True)
class BearingGradients(ActorGradients):
    """Takes gradients of any age."""

    correction = Correction("nothing", None)


class Lagging(Interpreting):
    """The plain loop whose actors hear of weights some iterations late."""

    heard: list[Any]
    lag: int

    def broadcast(self, tree: Any) -> Any:
        self.heard.append(tree)
        return self.heard[max(0, len(self.heard) - 1 - self.lag)]


def interpreted(algorithm: Toy, lag: int) -> tuple[Any, Any]:
    bound = algorithm.bind(drift_task(ENVS))
    state, actor = first_state(bound, Drift(), ENVS, SEED)
    heard: list[Any] = []
    for _ in range(ITERATIONS):
        rl = Lagging(bound, drift_step, actor)
        rl.heard, rl.lag = heard, lag
        state, _ = bound.iteration(rl, state)
        actor = rl.actor
    return state, actor


@pytest.mark.parametrize(
    ("strategy", "lag"),
    [
        (SplitDevices(staleness=1), 1),
        (SplitDevices(actor_devices=2, learner_devices=2, staleness=2), 2),
        (CentralInference(staleness=1), 1),
        (SplitDevices(staleness=0), 0),
    ],
)
def test_a_fixed_lag_is_that_of_a_loop_which_hears_late(strategy: Strategy, lag: int) -> None:
    state, actor = interpreted(Bearing(), lag)
    with Started(Bearing(), Drift(), strategy, seed=SEED) as running:
        running.advance(2)
        report = running.advance(ITERATIONS - 2)
    leaves_close(running.state, state)
    leaves_close(running.actor, actor)
    assert report.measures["staleness_max"] == lag
    ages = [min(turn, lag) for turn in range(ITERATIONS)]
    assert report.measures["staleness"] == pytest.approx(np.mean(ages))


def test_the_lag_makes_a_difference() -> None:
    states = [numbers(interpreted(Bearing(), lag)[0]) for lag in (0, 1, 2)]
    assert np.abs(states[0] - states[1]).max() > 1e-3
    assert np.abs(states[1] - states[2]).max() > 1e-3


@pytest.mark.parametrize(
    "strategy", [SplitDevices(staleness=1), ActorLearner(actors=4, staleness=0)]
)
def test_what_is_ordered_repeats_to_the_last_bit(strategy: Strategy) -> None:
    runs: list[np.ndarray] = []
    for _ in range(2):
        with Started(Bearing(), Drift(), strategy, seed=SEED) as running:
            running.advance(6)
        runs.append(np.concatenate([numbers(running.state), numbers(running.actor)]))
    np.testing.assert_array_equal(runs[0], runs[1])


@pytest.mark.parametrize(
    ("algorithm", "strategy"),
    [
        (Bearing(), ActorLearner(actors=4, staleness=1)),
        (Bearing(), ActorLearner(actors=2, staleness=3)),
        (BearingGradients(), ParameterServer(workers=4, staleness=2)),
        (BearingGradients(), ParameterServer(workers=2)),
    ],
)
def test_what_comes_as_it_comes_is_never_older_than_the_bound(
    algorithm: Toy, strategy: Strategy
) -> None:
    with Started(algorithm, Drift(), strategy, seed=SEED) as running:
        for _ in range(10):
            report = running.advance(4)
            assert 0 <= report.measures["staleness"] <= report.measures["staleness_max"]
            assert report.measures["staleness_max"] <= running.plan.staleness
    assert int(running.state.updates) == 40
    assert np.isfinite(numbers(running.state)).all()
    steps = np.asarray(running.actor.step).reshape(running.plan.actors, -1)
    assert (steps == steps[:, :1]).all()
    assert steps[:, 0].sum() >= 40 * 3 * running.plan.joined  # more if some were dropped
