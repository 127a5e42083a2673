"""Plans go to JSON and back exactly."""

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import HOST, planned
from toys import ActorGradients, Drift, Toy

from dovetail.errors import UserError
from dovetail.plan.ir import Instance, Link, LinkKind, Plan, Worker, WorkerKind
from dovetail.plan.serial import from_json, to_json
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

NAME = st.text(max_size=6)
SIZE = st.integers(0, 2**40)
PLANS = st.builds(
    Plan,
    strategy=NAME,
    algorithm=NAME,
    env=NAME,
    num_envs=SIZE,
    copies=st.dictionaries(NAME, SIZE, max_size=3).map(lambda sides: tuple(sides.items())),
    joined=SIZE,
    workers=st.lists(
        st.builds(
            Worker,
            NAME,
            st.lists(SIZE, max_size=3).map(tuple),
            st.sampled_from(WorkerKind),
            st.booleans(),
        ),
        max_size=2,
    ).map(tuple),
    instances=st.lists(
        st.builds(Instance, NAME, NAME, st.none() | st.tuples(SIZE, SIZE)), max_size=3
    ).map(tuple),
    links=st.lists(
        st.builds(Link, NAME, NAME, NAME, st.sampled_from(LinkKind), SIZE, SIZE), max_size=3
    ).map(tuple),
    staleness=SIZE,
    ordered=st.booleans(),
    batch=SIZE,
    batch_seconds=st.none() | st.floats(0, 1e6),
    notes=st.lists(NAME, max_size=2).map(tuple),
)
COUNT = st.sampled_from([1, 2, 4])
FLAG = st.booleans()
STRATEGIES: list[st.SearchStrategy[Strategy]] = [
    st.builds(Fused, devices=COUNT),
    st.just(Local()),
    st.builds(ActorLearner, actors=COUNT, staleness=st.just(0), processes=FLAG),
    st.builds(CentralInference, workers=COUNT, batch=st.none() | st.just(8), wait=st.floats(0, 1)),
    st.builds(
        SplitDevices,
        actor_devices=st.just(2),
        learner_devices=st.sampled_from([1, 2]),
        threads=COUNT,
        staleness=st.just(0),
    ),
    st.builds(DataParallel, devices=COUNT),
    st.builds(ParameterServer, workers=COUNT, synchronous=st.just(True)),
    st.builds(Environments, workers=COUNT, processes=FLAG),
]
"""Each of them with any options."""


def assert_survives(plan: Plan) -> None:
    written = to_json(plan)
    assert json.loads(json.dumps(written)) == written
    assert from_json(json.loads(json.dumps(written))) == plan
    assert set(written) == {field.name for field in fields(Plan)}


@pytest.mark.slow
@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@given(PLANS)
def test_a_plan_survives_json(plan: Plan) -> None:
    assert_survives(plan)


@pytest.mark.slow
@settings(max_examples=30, deadline=None, database=None, derandomize=True)
@given(st.one_of(STRATEGIES), st.sampled_from([Drift(), HOST]))
def test_the_plan_of_any_strategy_survives_json(strategy: Strategy, env: Any) -> None:
    if isinstance(strategy, Fused) or getattr(strategy, "processes", None):
        env = Drift() if isinstance(strategy, Fused) else HOST
    algorithm = ActorGradients() if isinstance(strategy, ParameterServer) else Toy()
    plan, _ = planned(strategy, algorithm, env)
    assert plan.strategy == strategy.name and plan.num_envs == algorithm.num_envs
    assert_survives(plan)


def small() -> dict[str, Any]:
    link = Link("gather", "a", "b", LinkKind.FUSED, 1, 1)
    workers, instances = (Worker("main", (0,)),), (Instance("a", "main", (0, 1)),)
    return to_json(Plan("p", "A", "e", 1, (("actor", 1),), 1, workers, instances, (link,)))


@pytest.mark.parametrize("missing", ["workers", "notes", "strategy", "copies"])
def test_a_file_that_is_no_plan(missing: str) -> None:
    written = small()
    del written[missing]
    with pytest.raises(UserError, match=f"not a plan as Dovetail writes one .*{missing}"):
        from_json(written)


@pytest.mark.parametrize(("part", "field"), [("links", "kind"), ("workers", "kind")])
def test_a_kind_that_does_not_exist(part: str, field: str) -> None:
    written = small()
    written[part][0][field] = "pigeon"
    with pytest.raises(UserError, match="pigeon"):
        from_json(written)


def test_a_plan_with_earlier_names_is_read() -> None:
    written = small()
    earlier = {
        {"strategy": "policy", "processes": "stations"}.get(k, k): written[k] for k in written
    }
    assert "policy" in earlier and "stations" in earlier
    assert from_json(earlier) == from_json(written)


def test_a_plan_from_before_copies_is_read() -> None:
    written = small()
    earlier = {key: value for key, value in written.items() if key != "copies"}
    plan = from_json(earlier | {"replicas": 2, "actors": 4, "shards": 3})
    assert (plan.copies_of("learner"), plan.actors, plan.copies_of("replay")) == (2, 4, 3)
