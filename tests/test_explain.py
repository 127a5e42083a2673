"""`explain` from the outside, and its texts for every algorithm under every strategy.

Where a strategy refuses an algorithm, the text is its sentence. After a change that is meant to
alter them: DOVETAIL_UPDATE_GOLDEN=1 pytest tests/test_explain.py
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from small import shared_traces
from toys import ActorGradients, Drift, Toy, TwoUnrolls

import dovetail
import dovetail.algorithms as algorithms
import dovetail.strategies as strategies
import dovetail.training.planning as planning
from dovetail.algorithms import ALGORITHMS
from dovetail.errors import UserError
from dovetail.graph.ir import Fragment
from dovetail.plan.serial import from_json
from dovetail.strategies import (
    STRATEGIES,
    ActorLearner,
    DataParallel,
    Fused,
    Local,
    ParameterServer,
    SplitDevices,
)
from dovetail.strategies.interface import Resources, Strategy

GOLDEN = Path(__file__).parent / "golden"
JAX, HOST = "dovetail:CartPole-v1", "gymnasium:CartPole-v1"
AT_HOME = {
    "local": HOST,
    "actor-learner": HOST,
    "central-inference": HOST,
    "environments": HOST,
}
"""Strategies for environments in Python; any other is explained on a JAX environment."""
CONTINUOUS = ("ddpg", "d4pg", "td3", "sac", "td3-bc", "cql")
"""Algorithms that are explained on Pendulum, not on CartPole."""
REFUSED = {
    (algorithm, "parameter-server"): "use --strategy actor-learner, or an algorithm such as a3c."
    for algorithm in ALGORITHMS
    if algorithm != "a3c"
}
"""What a strategy cannot do for an algorithm, by the end of the sentence that says so."""
OTHERS: dict[str, tuple[Any, Any, Strategy]] = {
    "ppo-fused-4-devices": (algorithms.PPO(), JAX, Fused(devices=4)),
    "ppo-data-parallel-host": (algorithms.PPO(), HOST, DataParallel()),
    "ppo-split-devices-2-and-2": (
        algorithms.PPO(),
        JAX,
        SplitDevices(actor_devices=2, learner_devices=2),
    ),
    "impala-actor-learner-jax": (algorithms.IMPALA(), JAX, ActorLearner(actors=4)),
    "a3c-parameter-server-synchronous": (algorithms.A3C(), JAX, ParameterServer(synchronous=True)),
    "dqn-actor-learner-shards": (algorithms.DQN(), JAX, ActorLearner(actors=4, shards=2)),
    "TwoUnrolls": (TwoUnrolls(num_envs=4), Drift(), Local()),
    "TwoUnrolls-actor-learner": (TwoUnrolls(num_envs=4), Drift(), ActorLearner()),
    "ActorGradients": (ActorGradients(num_envs=4), Drift(), Local()),
}
"""What the pairs with their default options do not show."""


@pytest.fixture(autouse=True)
def _a_machine_that_is_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(planning, "machine", lambda: Resources(devices=4, cores=2))


def built(name: str, among: dict[str, str], module: Any) -> Any:
    return getattr(module, among[name].partition(":")[2])()


def assert_golden(name: str, told: str) -> None:
    """Files of ours are told without the folder in which this copy of them lies."""
    told = told.replace(f"{Path(dovetail.__file__).parent.parent}{os.sep}", "")
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("DOVETAIL_UPDATE_GOLDEN"):
        file.write_text(told, encoding="utf-8")
    assert told == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_under_every_strategy(algorithm: str, strategy: str) -> None:
    chosen = built(algorithm, ALGORITHMS, algorithms), built(strategy, STRATEGIES, strategies)
    env = AT_HOME.get(strategy, JAX)
    if algorithm in CONTINUOUS:
        env = "gymnasium:Pendulum-v1" if env == HOST else "gymnax:Pendulum-v1"
    if (algorithm, strategy) in REFUSED:
        with pytest.raises(UserError) as refused, shared_traces():
            dovetail.explain(chosen[0], env, chosen[1])
        assert str(refused.value).endswith(REFUSED[algorithm, strategy])
        assert_golden(f"{algorithm}-{strategy}", f"{refused.value}\n")
    else:
        with shared_traces():
            explanation = dovetail.explain(chosen[0], env, chosen[1])
        assert (explanation.plan.strategy, explanation.graph.env) == (strategy, env)
        assert explanation.plan.num_envs == chosen[0].num_envs
        assert_golden(f"{algorithm}-{strategy}", str(explanation))


@pytest.mark.parametrize("name", OTHERS)
def test_loops_and_plans_of_other_forms(name: str) -> None:
    assert_golden(name, str(dovetail.explain(*OTHERS[name])))


def test_every_golden_text_has_its_test() -> None:
    pairs = {f"{algorithm}-{strategy}" for algorithm in ALGORITHMS for strategy in STRATEGIES}
    assert {file.stem for file in GOLDEN.glob("*.txt")} == pairs | set(OTHERS)


def test_the_default_strategy_goes_by_the_environment() -> None:
    assert dovetail.explain(Toy(), Drift()).plan.strategy == "fused"
    assert dovetail.explain(Toy(), "gymnasium:CartPole-v1").plan.strategy == "local"


def test_a_strategy_may_be_named() -> None:
    assert dovetail.explain(Toy(), Drift(), "local").plan.strategy == "local"
    with pytest.raises(UserError, match=r"no strategy 'fuzed': did you mean 'fused'\?"):
        dovetail.explain(Toy(), Drift(), "fuzed")


def test_the_strategy_chooses_between_back_ends() -> None:
    def env(strategy: str) -> str:
        return dovetail.explain(Toy(), "CartPole-v1", strategy).graph.env

    assert (env("fused"), env("local")) == ("dovetail:CartPole-v1", "gymnasium:CartPole-v1")


def test_a_host_environment_cannot_be_fused() -> None:
    with pytest.raises(UserError, match="steps on the host: use --strategy local"):
        dovetail.explain(Toy(), "gymnasium:CartPole-v1", "fused")


def test_environments_that_do_not_divide() -> None:
    with pytest.raises(UserError, match="6 environments cannot be split evenly among 4 devices"):
        dovetail.explain(Toy(num_envs=6), Drift(), Fused(devices=4))


def test_json_and_svg() -> None:
    explanation = dovetail.explain(Toy(), Drift(), Fused(devices=2))
    both = json.loads(explanation.json())
    assert (both["graph"]["num_envs"], both["plan"]["copies"]["actor"]) == (8, 2)
    assert from_json(both["plan"]) == explanation.plan
    assert explanation.svg().startswith("<svg ")
    assert "2 replicas, 8 environments, 24 steps per iteration" in explanation.svg()


def test_the_algorithm_is_bound_to_the_whole_task() -> None:
    seen: list[int] = []

    class Watching(Toy):
        def init(self, key: Any) -> Any:
            seen.append(self.task.num_envs)
            return super().init(key)

    explanation = dovetail.explain(Watching(), Drift(), Fused(devices=4))
    assert set(seen) == {8}
    assert explanation.graph.actor_envs == 2
    assert all(node.means == 1 for node in explanation.graph.nodes if isinstance(node, Fragment))
