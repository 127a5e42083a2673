"""Plans go to JSON and back exactly."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import UserError
from dovetail.plan.ir import Instance, Link, LinkKind, Plan, Worker
from dovetail.plan.serial import from_json, to_json

NAME = st.text(max_size=6)
SIZE = st.integers(0, 2**40)
PLANS = st.builds(
    Plan,
    policy=NAME,
    algorithm=NAME,
    env=NAME,
    num_envs=SIZE,
    replicas=SIZE,
    workers=st.lists(
        st.builds(Worker, NAME, st.lists(SIZE, max_size=3).map(tuple)), max_size=2
    ).map(tuple),
    instances=st.lists(st.builds(Instance, NAME, NAME), max_size=3).map(tuple),
    links=st.lists(
        st.builds(Link, NAME, NAME, NAME, st.sampled_from(LinkKind), SIZE, SIZE), max_size=3
    ).map(tuple),
    notes=st.lists(NAME, max_size=2).map(tuple),
)


@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@given(PLANS)
def test_a_plan_survives_json(plan: Plan) -> None:
    written = to_json(plan)
    assert json.loads(json.dumps(written)) == written
    assert from_json(json.loads(json.dumps(written))) == plan


@pytest.mark.parametrize("missing", ["workers", "notes", "policy"])
def test_a_file_that_is_no_plan(missing: str) -> None:
    fields = to_json(Plan("p", "A", "e", 1, 1, (), (), ()))
    del fields[missing]
    with pytest.raises(UserError, match=f"not a plan as Dovetail writes one .*{missing}"):
        from_json(fields)


def test_a_kind_of_link_that_does_not_exist() -> None:
    link = Link("gather", "a", "b", LinkKind.FUSED, 1, 1)
    fields = to_json(Plan("p", "A", "e", 1, 1, (), (), (link,)))
    fields["links"][0]["kind"] = "pigeon"
    with pytest.raises(UserError, match="pigeon"):
        from_json(fields)
