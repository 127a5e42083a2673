"""Recorded data under the strategies: each synchronous one equals the interpreter."""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from agreement import assert_close, without_order
from recorded_control import OFFLINE, OfflineTD3, record_random
from small import STEPS, Started, numbers

import dovetail
from dovetail.algorithm import Algorithm
from dovetail.algorithms import DQN, SAC
from dovetail.errors import UserError
from dovetail.strategies import ActorLearner, DataParallel, Fused, Local
from dovetail.strategies.interface import Strategy
from dovetail.training.dataset import RecordedData

ENVS, UPDATES, SEED = 4, 3, 3
CARTPOLE = "dovetail:CartPole-v1?limit=5"
HOST = "gymnasium:CartPole-v1?vectorization=sync&max_episode_steps=5"
PENDULUM = "gymnasium:Pendulum-v1?vectorization=sync&max_episode_steps=5"
SMALL: dict[str, Any] = {"buffer_size": 64, "learning_starts": 1, "num_envs": ENVS}
DQN_SMALL = DQN(4, 2, 8, **SMALL, hidden_sizes=(8,), n_step=3, prioritized=True)


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_random(tmp_path_factory.mktemp("data") / "cartpole", "CartPole-v1", 6, 9)


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_random(tmp_path_factory.mktemp("data") / "pendulum", "Pendulum-v1", 4, 9)


@cache
def interpreted(algorithm: Algorithm, env: str, folder: Path, online: bool, shards: int) -> Any:
    """Where the plain loop comes to."""
    told: dict[str, Any] = {
        "iterations": UPDATES,
        "total_steps": STEPS,
        "seed": SEED,
    }
    told |= {"data": folder, "online": online, "shards": shards}
    return dovetail.interpret(algorithm, env, debug=False, **told).state


def compare(
    algorithm: Algorithm,
    env: str,
    strategy: Strategy,
    folder: Path,
    *,
    online: bool,
) -> Any:
    """The state after some updates, which is where the plain loop comes to."""
    data = RecordedData(folder)
    with Started(algorithm, env, strategy, seed=SEED, data=data, online=online) as running:
        before = numbers(running.state.params)
        running.advance(1)
        running.advance(UPDATES - 1)
        shards = running.plan.shards
    data.close()
    found, wanted = running.state, interpreted(algorithm, env, folder, online, shards)
    assert np.abs(numbers(wanted.params) - before).max() > 1e-4
    if online:
        found, wanted = without_order(found), without_order(wanted)
    assert_close(found, wanted)
    return running.state


OFFLINE_STRATEGIES: dict[str, Strategy] = {
    "fused": Fused(),
    "local": Local(),
    "4 replicas": DataParallel(devices=4),
    "fused on 2 devices": Fused(devices=2),
}


@pytest.mark.parametrize("strategy", OFFLINE_STRATEGIES)
def test_a_strategy_equals_the_interpreter_where_nobody_acts(strategy: str, cartpole: Path) -> None:
    state = compare(DQN_SMALL, CARTPOLE, OFFLINE_STRATEGIES[strategy], cartpole, online=False)
    assert state.replay == () and int(state.updates) == UPDATES


@pytest.mark.parametrize("strategy", ["fused", "local"])
def test_the_environment_need_not_be_compiled(strategy: str, pendulum: Path) -> None:
    algorithm = OfflineTD3(**OFFLINE, num_envs=ENVS, normalize_observations=True)
    state = compare(algorithm, PENDULUM, OFFLINE_STRATEGIES[strategy], pendulum, online=False)
    assert int(state.steps) == UPDATES * 4
    assert float(state.moments.weight) == UPDATES * 4 * 8


@pytest.mark.parametrize(
    ("algorithm", "env", "strategy"),
    [
        (DQN_SMALL, CARTPOLE, Fused()),
        (DQN_SMALL, HOST, Local()),
        (DQN_SMALL, HOST, ActorLearner(actors=2, staleness=0, processes=False)),
        (DQN_SMALL, HOST, ActorLearner(actors=2, staleness=0, shards=2, processes=False)),
        (SAC(**OFFLINE, **SMALL), PENDULUM, Local()),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_recorded_and_replayed_steps_make_a_batch(
    algorithm: Algorithm, env: str, strategy: Strategy, cartpole: Path, pendulum: Path
) -> None:
    folder = pendulum if env == PENDULUM else cartpole
    compare(algorithm, env, strategy, folder, online=True)


def test_replicas_hold_the_data_once_each(cartpole: Path) -> None:
    data = RecordedData(cartpole)
    with Started(DQN_SMALL, CARTPOLE, Fused(devices=4), data=data, online=False) as running:
        running.advance(1)
    data.close()
    for leaf in jax.tree.leaves(running.state.data):
        assert {device.id for device in leaf.devices()} == {0, 1, 2, 3}


@pytest.mark.parametrize(("batch", "devices"), [(7, 2), (8, 3)])
def test_a_batch_that_replicas_cannot_share(cartpole: Path, batch: int, devices: int) -> None:
    """Nobody acts, so it is about the batch, not about the environments."""
    data = RecordedData(cartpole)
    told = rf"one for each learner replica.* \[2, {batch}\]: choose another number of items"
    with pytest.raises(UserError, match=told):
        Started(
            DQN(4, 2, batch, **SMALL, hidden_sizes=(8,)),
            CARTPOLE,
            Fused(devices=devices),
            data=data,
            online=False,
        )
    data.close()


def test_who_only_acts_has_nothing_to_do(cartpole: Path) -> None:
    data = RecordedData(cartpole)
    with pytest.raises(UserError, match="nobody acts in it: use fused, local or data-parallel"):
        Started(DQN_SMALL, HOST, ActorLearner(actors=2), data=data, online=False)
    data.close()
