"""The promise: every synchronous strategy computes what the interpreter computes."""

import jax
import numpy as np
import pytest
from agreement import (
    ALGORITHMS,
    CARTPOLE,
    CONTINUOUS,
    HOST,
    HOST_PENDULUM,
    PENDULUM,
    SEED,
    UPDATES,
    advance_and_compare,
    interpreted,
)
from small import Started, a2c, numbers

import dovetail.strategies
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

STRATEGIES: dict[str, Strategy] = {
    "fused": Fused(),
    "fused on 2 devices": Fused(devices=2),
    "fused on 4 devices": Fused(devices=4),
    "local": Local(),
    "1 actor": ActorLearner(actors=1, staleness=0, processes=False),
    "2 actors": ActorLearner(actors=2, staleness=0, processes=False),
    "4 actors": ActorLearner(actors=4, staleness=0, processes=False),
    "2 actors' processes": ActorLearner(actors=2, staleness=0, processes=True),
    "replay apart": ActorLearner(actors=2, staleness=0, shards=1, processes=False),
    "2 shards": ActorLearner(actors=4, staleness=0, shards=2, processes=False),
    "4 shards": ActorLearner(actors=4, staleness=0, shards=4, processes=False),
    "inference": CentralInference(workers=4, processes=False),
    "inference, one at a time": CentralInference(workers=4, batch=2, processes=False),
    "inference, processes": CentralInference(workers=4, processes=True),
    "1 replica": DataParallel(devices=1),
    "2 replicas": DataParallel(devices=2),
    "4 replicas": DataParallel(devices=4),
    "split devices": SplitDevices(staleness=0),
    "split devices, 2 and 2": SplitDevices(actor_devices=2, learner_devices=2, staleness=0),
    "environments": Environments(workers=2, processes=False),
    "environments, processes": Environments(workers=4, processes=True),
    "parameter server": ParameterServer(workers=4, synchronous=True),
}
SOME = ("fused", "local")
COMPILED = {
    "ppo": (
        *("fused on 4 devices", "local", "4 actors", "inference"),
        *("split devices, 2 and 2", "environments"),
    ),
    "a2c": (*SOME, "1 actor", "inference, one at a time"),
    "reinforce": SOME,
    "impala": ("local", "1 replica", "4 replicas", "4 actors", "split devices"),
    "a3c": (*SOME, "parameter server"),
    "ppo-recurrent": ("local", "fused on 2 devices", "inference"),
    "a2c-recurrent": ("fused on 2 devices", "2 actors"),
    "reinforce-recurrent": ("local", "fused on 2 devices"),
    "impala-recurrent": ("fused", "split devices, 2 and 2"),
    "dqn": ("local", "4 actors", "inference", "environments", "1 replica", "fused on 4 devices"),
    "dqn-prioritized": (
        *SOME,
        *("split devices", "replay apart", "2 shards", "4 shards", "2 replicas"),
    ),
    "rainbow": ("fused",),
    "qr-dqn": ("split devices",),
    "apex": (*SOME, "inference, one at a time", "2 shards", "split devices, 2 and 2"),
    "r2d2": (*SOME, "inference", "2 shards", "2 replicas"),
    "ddpg": ("fused", "1 actor"),
    "d4pg": ("fused", "4 actors", "1 replica"),
    "td3": (*SOME, "2 actors"),
    "sac": (*SOME, "2 actors", "inference", "environments", "split devices", "4 replicas"),
    "sac-droq": ("fused",),
    "sac-discrete": (*SOME, "2 actors"),
}
"""On a JAX environment: every strategy with some algorithm, and every algorithm with some."""
ON_THE_HOST = {
    "ppo": (
        *("4 actors", "2 actors' processes", "inference", "inference, processes", "4 replicas"),
        *("split devices, 2 and 2", "environments", "environments, processes"),
    ),
    "a2c": ("local", "2 actors' processes", "inference, one at a time", "1 replica"),
    "impala": ("4 actors", "inference, processes", "split devices, 2 and 2"),
    "a3c": ("local", "parameter server"),
    "ppo-recurrent": ("local", "inference, processes", "2 replicas"),
    "dqn": ("local", "4 actors", "inference, processes", "2 replicas"),
    "dqn-prioritized": ("local", "2 actors' processes", "replay apart", "2 shards"),
    "apex": ("2 actors", "inference, processes"),
    "r2d2": ("local", "environments"),
    "d4pg": ("local", "2 actors' processes"),
    "td3": ("local",),
    "sac": ("local", "2 actors", "inference, processes", "environments", "split devices, 2 and 2"),
    "sac-discrete": ("local",),
}


def pairs(cases: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [
        (algorithm, strategy) for algorithm, strategies in cases.items() for strategy in strategies
    ]


def run_and_compare(algorithm: str, env: str, strategy: Strategy) -> None:
    with Started(ALGORITHMS[algorithm], env, strategy, seed=SEED) as running:
        advance_and_compare(running, algorithm, env)


@pytest.mark.parametrize(("algorithm", "strategy"), pairs(COMPILED))
def test_a_strategy_equals_the_interpreter(algorithm: str, strategy: str) -> None:
    env = PENDULUM if algorithm in CONTINUOUS else CARTPOLE
    run_and_compare(algorithm, env, STRATEGIES[strategy])


@pytest.mark.parametrize(("algorithm", "strategy"), pairs(ON_THE_HOST))
def test_a_strategy_equals_the_interpreter_on_the_host(algorithm: str, strategy: str) -> None:
    env = HOST_PENDULUM if algorithm in CONTINUOUS else HOST
    run_and_compare(algorithm, env, STRATEGIES[strategy])


@pytest.mark.parametrize(
    ("autoreset", "strategy"),
    [
        ("next_step", "local"),
        ("next_step", "inference"),
        ("same_step", "local"),
        ("disabled", "local"),
        ("disabled", "environments, processes"),
    ],
)
def test_whoever_resets_the_environments(autoreset: str, strategy: str) -> None:
    run_and_compare("ppo-recurrent", f"{HOST}&autoreset={autoreset}", STRATEGIES[strategy])


def test_every_strategy_is_compared() -> None:
    compared = {strategy for cases in (COMPILED, ON_THE_HOST) for _, strategy in pairs(cases)}
    assert compared == set(STRATEGIES)
    kinds = {type(strategy).__name__ for strategy in STRATEGIES.values()}
    assert kinds == {target.partition(":")[2] for target in dovetail.strategies.STRATEGIES.values()}


def test_another_seed_is_another_run() -> None:
    """So that agreement means something."""
    with Started(ALGORITHMS["a2c"], CARTPOLE, STRATEGIES["local"], seed=SEED + 1) as running:
        running.advance(UPDATES)
    expected, _ = interpreted("a2c", CARTPOLE)
    assert np.abs(numbers(running.state.params) - numbers(expected.params)).max() > 1e-3


def test_several_devices_do_split_the_environments() -> None:
    with Started(a2c(), "dovetail:CartPole-v1", Fused(devices=4)) as running:
        running.advance(1)
    shards = running.actor.step.addressable_shards
    assert [shard.data.shape for shard in shards] == [(2,)] * 4
    assert len({shard.device for shard in shards}) == 4 == len(jax.devices())


def test_learners_on_several_devices_do_share_the_work() -> None:
    strategy = SplitDevices(actor_devices=2, learner_devices=2, threads=1, staleness=0)
    with Started(a2c(), "dovetail:CartPole-v1", strategy) as running:
        running.advance(1)
    assert [worker.devices for worker in running.plan.workers] == [(2, 3), (0,), (1,)]
    for leaf in jax.tree.leaves(running.state.params):
        assert {device.id for device in leaf.devices()} == {2, 3}
