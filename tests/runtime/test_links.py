"""What the plan prints is what happens: the spans of a run name the links that the plan has."""

from typing import Any

import pytest
from agreement import ALGORITHMS, CARTPOLE, HOST
from links import assert_links_are_the_plans
from small import Started

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

UPDATES = 3
CASES: dict[str, tuple[str, str, Strategy]] = {
    "fused": ("ppo", CARTPOLE, Fused()),
    "local": ("ppo", HOST, Local()),
    "local with a replay": ("dqn", HOST, Local()),
    "replay in a worker": ("dqn", HOST, Local(sides=("replay",))),
    "actors": ("ppo", HOST, ActorLearner(actors=2, staleness=0, processes=False)),
    "shards": (
        "dqn-prioritized",
        HOST,
        ActorLearner(actors=4, staleness=0, shards=2, processes=False),
    ),
    "inference": ("ppo", HOST, CentralInference(workers=2, processes=False)),
    "replicas": ("ppo", HOST, DataParallel(devices=2)),
    "replicas with a replay": ("dqn", HOST, DataParallel(devices=2)),
    "split devices": ("ppo", HOST, SplitDevices(actor_devices=2, learner_devices=2, staleness=0)),
    "environments": ("ppo", HOST, Environments(workers=2, processes=False)),
    "gradients": ("a3c", HOST, ParameterServer(workers=2, synchronous=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_links_are_used_as_the_plan_says(case: str) -> None:
    algorithm, env, strategy = CASES[case]
    chosen: Any = ALGORITHMS[algorithm]
    with Started(chosen, env, strategy) as running:
        report = running.advance(UPDATES)
    assert_links_are_the_plans(running.plan, running.graph, report, UPDATES)


def test_an_insert_does_not_pass_the_learner() -> None:
    algorithm, env, strategy = CASES["shards"]
    with Started(ALGORITHMS[algorithm], env, strategy) as running:
        spans = running.advance(UPDATES).spans
    assert not [s for s in spans["learner"] if s.name == "insert"]
    assert [s for s in spans["replay-1"] if s.name == "insert"]
