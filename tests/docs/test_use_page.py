"""The page on trained policies is true: its programs run, and its loader needs NumPy alone."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from pages import DOCS, blocks
from small import QUIET, ppo

import dovetail as dt
from dovetail.algorithm import Task
from dovetail.algorithms import ALGORITHMS
from dovetail.envs.interface import Continuous
from dovetail.envs.own import from_object
from dovetail.evaluation.export import PolicyExporter
from dovetail.evaluation.operations import REDUCTIONS, SAME
from dovetail.loading import load_object

PAGE = DOCS["use-your-policy.md"]
LOADER, USE = blocks(PAGE, "python")[-2:]

BOX = spaces.Box(-2, 2, (3,), np.float32)
DICT = spaces.Dict({"place": spaces.Discrete(4, start=1), "arm": BOX, "on": spaces.MultiBinary(2)})
TORQUE = spaces.Box(np.array([-2, 0], np.float32), np.array([2, np.inf], np.float32))

ALONE = """
import importlib.util, json, sys
class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "safetensors", "gymnasium", "dovetail"):
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Guard())
exec(sys.argv[1])
asked = json.loads(sys.argv[2])
found = [[Policy(folder).predict(seen).tolist() for seen in shown] for folder, shown in asked]
print(json.dumps(found))
"""


def bound(algorithm: Any, observation: Any, action: Any) -> Any:
    class Shown(gymnasium.Env[Any, Any]):
        observation_space, action_space = observation, action

    return algorithm.bind(Task(from_object(Shown, {}, "test:Shown").spec, 2, 10))


def shaken(params: Any) -> Any:
    """The parameters with noise, so that a policy does different things."""
    leaves, tree = jax.tree.flatten(params)
    random = np.random.default_rng(0)
    return jax.tree.unflatten(
        tree,
        [
            x + random.normal(size=x.shape).astype(np.float32) if x.dtype == jnp.float32 else x
            for x in leaves
        ],
    )


def with_moments(params: Any) -> Any:
    """The parameters with statistics of observations that change what the policy does."""
    moments = params.moments
    mean = jnp.linspace(-1, 1, moments.mean.size)
    variance = jnp.linspace(0.1, 4, moments.mean.size)
    return params._replace(moments=moments._replace(mean=mean, variance=variance))


CASES: list[tuple[str, dict[str, Any], Any, Any]] = [
    ("ppo", {"normalize_observations": True}, DICT, spaces.Discrete(5, start=2)),
    ("ppo", {"normalize_observations": True, "activation": "silu"}, BOX, TORQUE),
    ("reinforce", {"normalize_rewards": True}, BOX, spaces.Discrete(3)),
    ("sac", {}, BOX, spaces.Box(-2, 6, (2,), np.float32)),
    ("td3", {}, BOX, spaces.Box(0, 9, (1, 2), np.int32)),
    ("dqn", {"dueling": True}, spaces.MultiDiscrete([3, 4]), spaces.Discrete(4)),
    ("a2c", {}, BOX, spaces.MultiDiscrete([2, 3])),
]


@pytest.mark.slow
def test_the_loader_acts_as_predict_with_numpy_alone(tmp_path: Path) -> None:
    asked: list[tuple[str, list[Any]]] = []
    expected: list[list[Any]] = []
    for number, (name, options, observation, action) in enumerate(CASES):
        kind = load_object(ALGORITHMS[name], "algorithm")
        made = bound(kind(hidden_sizes=(8, 8), **options), observation, action)
        params = shaken(made.acting(made.init(jax.random.key(number))))
        params = with_moments(params) if "normalize_observations" in options else params
        exported = PolicyExporter(made).export(params)
        folder = exported.write(tmp_path / str(number))
        observation.seed(number)
        rows = [observation.sample() for _ in range(20)]
        policy = exported.policy()
        expected.append([policy.predict(row)[0].tolist() for row in rows])
        assert len({json.dumps(choice) for choice in expected[-1]}) > 1, name
        asked.append((str(folder), json.loads(json.dumps(rows, default=lambda x: x.tolist()))))
    command = [sys.executable, "-I", "-c", ALONE, LOADER, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for found, wanted in zip(json.loads(done.stdout), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_plain_policy_has_its_operations(name: str) -> None:
    kind = load_object(ALGORITHMS[name], "algorithm")
    action = BOX if kind.actions == (Continuous,) else spaces.Discrete(3)
    made = bound(kind(), BOX, action)
    params = made.acting(made.init(jax.random.key(0)))
    record = PolicyExporter(made).export(params).record
    assert (record["operations"] is None) == bool(jax.tree.leaves(made.initial_carry()))


def test_the_loader_knows_every_function() -> None:
    names: dict[str, Any] = {}
    exec(LOADER, names)
    written = {*SAME.values(), *REDUCTIONS.values()}
    written |= {"append", "argmax", "asarray", "broadcast_to", "isfinite", "matmul", "reshape"}
    written |= {"transpose", "where"}
    assert set(names["FUNCTIONS"]) == written | {"slice"}
    assert all(hasattr(np, name) for name in written)


@pytest.mark.slow
def test_the_programs_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    settings = dataclasses.replace(QUIET, folder="runs/cartpole")
    run = dt.train(ppo(), "CartPole-v1", total_steps=256, settings=settings)
    names: dict[str, Any] = {}
    for program in blocks(PAGE, "python"):
        exec(program, names)
    told = capsys.readouterr().out
    assert told.startswith("Policy(PPO on gymnasium:CartPole-v1, step 256, mean return ")
    chosen, _ = dt.load(run).predict(names["observation"])
    assert names["action"] == chosen
    assert names["actions"].shape == (8,)
