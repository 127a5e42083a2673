"""`explain` from the outside, and its texts for every algorithm under every policy.

After a change that is meant to alter them: DOVETAIL_UPDATE_GOLDEN=1 pytest tests/test_explain.py
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from toys import ActorGradients, Drift, Toy, TwoUnrolls

import dovetail
import dovetail.algorithms as algorithms
import dovetail.policies as policies
from dovetail.algorithms import ALGORITHMS
from dovetail.errors import UserError
from dovetail.explanation import Explanation
from dovetail.graph.ir import Fragment
from dovetail.plan.serial import from_json
from dovetail.policies import POLICIES
from dovetail.policies.fused import Fused
from dovetail.policies.local import Local

GOLDEN = Path(__file__).parent / "golden"
ENVS = {"fused": "dovetail:CartPole-v1", "local": "gymnasium:CartPole-v1"}
"""Where each policy is at home; a policy of a new name is explained on a JAX environment."""


def built(name: str, among: dict[str, str], module: Any) -> Any:
    return getattr(module, among[name].partition(":")[2])()


def assert_golden(name: str, explanation: Explanation) -> None:
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("DOVETAIL_UPDATE_GOLDEN"):
        file.write_text(str(explanation), encoding="utf-8")
    assert str(explanation) == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_under_every_policy(algorithm: str, policy: str) -> None:
    explanation = dovetail.explain(
        built(algorithm, ALGORITHMS, algorithms),
        ENVS.get(policy, "dovetail:CartPole-v1"),
        built(policy, POLICIES, policies),
    )
    assert_golden(f"{algorithm}-{policy}", explanation)


def test_ppo_on_four_devices() -> None:
    explanation = dovetail.explain(algorithms.PPO(), "dovetail:CartPole-v1", Fused(devices=4))
    assert_golden("ppo-fused-4-devices", explanation)


@pytest.mark.parametrize("toy", [TwoUnrolls(), ActorGradients()])
def test_loops_of_other_forms(toy: Toy) -> None:
    assert_golden(type(toy).__name__, dovetail.explain(toy, Drift(), Local(envs=4)))


def test_every_golden_text_has_its_test() -> None:
    pairs = {f"{algorithm}-{policy}" for algorithm in ALGORITHMS for policy in POLICIES}
    others = {"ppo-fused-4-devices", "TwoUnrolls", "ActorGradients"}
    assert {file.stem for file in GOLDEN.glob("*.txt")} == pairs | others


def test_the_default_policy_goes_by_the_environment() -> None:
    assert dovetail.explain(Toy(), Drift()).plan.policy == "fused"
    assert dovetail.explain(Toy(), "gymnasium:CartPole-v1").plan.policy == "local"


def test_a_policy_may_be_named() -> None:
    assert dovetail.explain(Toy(), Drift(), "local").plan.policy == "local"
    with pytest.raises(UserError, match=r"no policy 'fuzed': did you mean 'fused'\?"):
        dovetail.explain(Toy(), Drift(), "fuzed")


def test_the_policy_chooses_between_back_ends() -> None:
    def env(policy: str) -> str:
        return dovetail.explain(Toy(), "CartPole-v1", policy).graph.env

    assert (env("fused"), env("local")) == ("dovetail:CartPole-v1", "gymnasium:CartPole-v1")


def test_a_host_environment_cannot_be_fused() -> None:
    with pytest.raises(UserError, match="steps on the host: use --policy local"):
        dovetail.explain(Toy(), "gymnasium:CartPole-v1", "fused")


def test_environments_that_do_not_divide() -> None:
    with pytest.raises(UserError, match="6 environments cannot be split evenly among 4 replicas"):
        dovetail.explain(Toy(), Drift(), Fused(envs=6, devices=4))


def test_json_and_svg() -> None:
    explanation = dovetail.explain(Toy(), Drift(), Fused(envs=8, devices=2))
    both = json.loads(explanation.json())
    assert both["graph"]["num_envs"] == 4
    assert from_json(both["plan"]) == explanation.plan
    assert explanation.svg().startswith("<svg ")
    assert "2 replicas, on each 4 environments" in explanation.svg()


def test_the_algorithm_is_bound_to_the_whole_task() -> None:
    seen: list[int] = []

    class Watching(Toy):
        def init(self, key: Any) -> Any:
            seen.append(self.task.num_envs)
            return super().init(key)

    explanation = dovetail.explain(Watching(), Drift(), Fused(envs=8, devices=4))
    assert seen == [8]
    assert explanation.graph.num_envs == 2
    assert all(node.means == 1 for node in explanation.graph.nodes if isinstance(node, Fragment))
