"""Under every asynchronous strategy the cart-pole is solved and the staleness bound is kept."""

from pathlib import Path

import pytest

import dovetail as dt
from dovetail.algorithm import Algorithm
from dovetail.algorithms import A3C, APPO, IMPALA, PPO, ApeX
from dovetail.strategies import ActorLearner, CentralInference, ParameterServer, SplitDevices
from dovetail.strategies.interface import Strategy

pytestmark = pytest.mark.slow

CASES: dict[str, tuple[Algorithm, Strategy, int]] = {
    "IMPALA, actor-learner": (IMPALA(num_envs=16), ActorLearner(processes=False), 2),
    "APPO, actor-learner": (APPO(num_envs=16), ActorLearner(processes=True), 2),
    "PPO, actor-learner": (PPO(num_envs=16), ActorLearner(staleness=1, processes=False), 1),
    "PPO, central-inference": (
        PPO(num_envs=16),
        CentralInference(workers=4, staleness=1, processes=False),
        1,
    ),
    "PPO, split-devices": (PPO(num_envs=16), SplitDevices(), 1),
    "Ape-X, actor-learner, 2 shards": (
        ApeX(),
        ActorLearner(actors=4, shards=2, processes=False),
        2,
    ),
    "A3C, parameter-server": (A3C(), ParameterServer(), 4),
}


@pytest.mark.parametrize("case", CASES)
def test_cartpole_is_solved_within_the_bound(
    case: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    algorithm, strategy, bound = CASES[case]
    if isinstance(algorithm, ApeX):  # learns for a long time after it is compiled
        request.getfixturevalue("optimized")
    settings = dt.Settings(
        folder=str(tmp_path / "run"), video=False, display="none", evaluate_every=5, until=475
    )
    run = dt.train(algorithm, "CartPole-v1", strategy, total_steps=1_500_000, settings=settings)
    assert run.summary["final_return"] >= 475
    worst = run.metrics["staleness_max"].max()
    assert 0 < worst <= bound
