"""Exported policies act as the algorithm does, without its code, or are refused with a sentence."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.algorithm import Algorithm, Task, Timestep
from dovetail.envs.interface import ActionSpace, Continuous, Discrete, EnvSpec, MultiDiscrete
from dovetail.errors import UserError
from dovetail.evaluation.export import Exported, PolicyExporter, read_exported
from dovetail.evaluation.policy import Policy
from dovetail.run.checkpoint import digest_of

ENV = EnvSpec("fake:Env", jax.ShapeDtypeStruct((4,), jnp.float32), Discrete(3))


class Memory(NamedTuple):
    hidden: jax.Array
    steps: jax.Array


@dataclass(frozen=True)
class Recurrent(Algorithm):
    """Remembers observations and rewards; its first step differs from its later ones."""

    def initial_carry(self) -> Memory:
        return Memory(jnp.full(3, 0.5), jnp.int32(0))

    def greedy(self, params: Any, carry: Memory, timestep: Timestep) -> tuple[Any, Memory]:
        hidden = jnp.tanh(timestep.observation @ params["w"] + carry.hidden + timestep.reward)
        hidden = hidden + jnp.where(timestep.first, params["bias"], 0)
        action = jnp.argmax(hidden * (1 + carry.steps)).astype(jnp.int32)
        return action, Memory(hidden, carry.steps + 1)


@dataclass(frozen=True)
class Plain(Algorithm):
    """No carry; a dict observation with an image; several kinds of action."""

    def greedy(self, params: Any, carry: Any, timestep: Timestep) -> tuple[Any, Any]:
        seen = timestep.observation
        features = seen["image"].astype(jnp.float32).sum((0, 1)) / 255 + seen["vector"]
        match self.task.env.action:
            case Continuous():
                return jnp.tanh(features @ params["w"]), carry
            case MultiDiscrete():
                return (features @ params["w"] > 0).astype(jnp.int32), carry
            case _:
                return jnp.argmax(features @ params["w"]).astype(jnp.int32), carry


@dataclass(frozen=True)
class FixedBatch(Recurrent):
    """Wants the batch size as a number, which an exported program cannot give."""

    def greedy(self, params: Any, carry: Memory, timestep: Timestep) -> tuple[Any, Memory]:
        @jax.custom_batching.custom_vmap
        def twice(x: jax.Array) -> jax.Array:
            return 2 * x

        @twice.def_vmap
        def rule(axis_size: int, batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
            return jnp.stack([2 * x[i] for i in range(int(axis_size))]), True

        observation = twice(timestep.observation)
        return super().greedy(params, carry, timestep._replace(observation=observation))


def bound(algorithm: Algorithm, env: EnvSpec = ENV) -> Algorithm:
    return algorithm.bind(Task(env, num_envs=2, steps=10))


def recurrent_params() -> dict[str, jax.Array]:
    w = jax.random.normal(jax.random.key(1), (4, 3))
    return {"w": w, "bias": jnp.array([0.0, 0.3, -0.3], jnp.bfloat16)}


def export(folder: Path, algorithm: Algorithm, params: Any) -> Path:
    return PolicyExporter(algorithm).export(params).write(folder)


def weights(folder: Path) -> str:
    (file,) = folder.glob("*.safetensors")
    return file.name


def load(folder: Path) -> Policy:
    return read_exported(folder).policy()


def greedy_rollout(algorithm: Algorithm, params: Any, observations: np.ndarray) -> list[int]:
    carry, actions = algorithm.initial_carry(), []
    for t, observation in enumerate(observations):
        timestep = Timestep(jnp.asarray(observation), jnp.float32(t), jnp.asarray(t == 0))
        action, carry = algorithm.greedy(params, carry, timestep)
        actions.append(int(action))
    return actions


@pytest.fixture
def observations() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


@pytest.mark.parametrize("algorithm", [Recurrent(), FixedBatch()])
def test_one_environment_acts_as_the_algorithm_does(
    tmp_path: Path, observations: np.ndarray, algorithm: Algorithm
) -> None:
    algorithm, params = bound(algorithm), recurrent_params()
    policy = load(export(tmp_path, algorithm, params))
    carry, actions = None, []
    for t, observation in enumerate(observations):
        action, carry = policy.predict(observation, carry, reward=float(t))
        assert (action.shape, action.dtype) == ((), np.int64)
        actions.append(int(action))
    expected = greedy_rollout(algorithm, params, observations)
    assert actions == expected
    assert len(set(expected)) > 1
    assert carry is not None
    assert [leaf.shape for leaf in carry] == [(3,), ()]
    assert carry[1] == 6


@pytest.mark.parametrize("algorithm", [Recurrent(), FixedBatch()])
def test_each_row_of_any_batch_acts_alone(
    tmp_path: Path, observations: np.ndarray, algorithm: Algorithm
) -> None:
    policy = load(export(tmp_path, bound(algorithm), recurrent_params()))
    together, carry = policy.predict(observations)
    assert carry is not None
    assert together.shape == (6,) and carry[0].shape == (6, 3)
    assert together.tolist() == [int(policy.predict(row)[0]) for row in observations]
    assert policy.predict(observations[:2])[0].tolist() == together[:2].tolist()


@pytest.mark.parametrize(("algorithm", "batched"), [(Recurrent(), True), (FixedBatch(), False)])
def test_the_program_takes_a_batch_where_it_can(
    tmp_path: Path, algorithm: Algorithm, batched: bool
) -> None:
    folder = export(tmp_path, bound(algorithm), recurrent_params())
    assert (
        json.loads((folder / "policy.json").read_text())["programs"]["greedy"]["batched"] is batched
    )


def test_first_begins_an_episode_in_some_rows(tmp_path: Path, observations: np.ndarray) -> None:
    policy = load(export(tmp_path, bound(Recurrent()), recurrent_params()))
    _, carry = policy.predict(observations[:2])
    _, after = policy.predict(observations[2:4], carry, np.array([False, True]))
    _, alone = policy.predict(observations[3])
    assert after is not None and alone is not None
    np.testing.assert_array_equal(after[1], [2, 1])
    np.testing.assert_array_equal(after[0][1], alone[0])


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (Discrete(3), [2, 0]),
        (MultiDiscrete((2, 2, 2)), [[0, 0, 1], [1, 0, 0]]),
        (Continuous(3, bounded=True), [[-0.9640, 0.0, 0.9640], [0.9640, 0.0, -0.9640]]),
    ],
)
def test_images_and_kinds_of_action(tmp_path: Path, action: ActionSpace, expected: Any) -> None:
    image = jax.ShapeDtypeStruct((2, 2, 2), jnp.uint8)
    seen = {"image": image, "vector": jax.ShapeDtypeStruct((2,), jnp.float32)}
    algorithm = bound(Plain(), EnvSpec("fake:Image", seen, action))
    params = {"w": jnp.array([[-1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])}
    policy = load(export(tmp_path, algorithm, params))
    batch = {"image": np.zeros((2, 2, 2, 2), np.uint8), "vector": np.array([[2.0, 1], [-6.0, -1]])}
    batch["image"][1] = 255
    np.testing.assert_allclose(policy.predict(batch)[0], expected, atol=1e-4)


def test_the_folder_holds_two_files_that_say_what_they_are(tmp_path: Path) -> None:
    folder = export(tmp_path / "policy", bound(Recurrent()), recurrent_params())
    record = json.loads((folder / "policy.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == ["policy.json", weights(folder)]
    assert record["env"] == "fake:Env"
    assert record["output"] == {"kind": "Discrete", "n": 3}
    assert record["inputs"] == [{"name": "observation", "shape": [4], "dtype": "float32"}]
    assert record["programs"]["greedy"]["platforms"] == ["cpu", "cuda", "tpu"]
    assert "sample" not in record["programs"] and record["operations"] is None
    assert record["params"] == [
        {"name": "params.bias", "shape": [3], "dtype": "bfloat16"},
        {"name": "params.w", "shape": [4, 3], "dtype": "float32"},
    ]
    assert [entry["name"] for entry in record["carry"]] == ["carry.hidden", "carry.steps"]


def test_it_loads_without_the_algorithms_and_their_networks(
    tmp_path: Path, observations: np.ndarray
) -> None:
    algorithm, params = bound(Recurrent()), recurrent_params()
    folder = export(tmp_path / "policy", algorithm, params)
    np.save(tmp_path / "observations.npy", observations)
    script = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("dovetail.algorithms", "dovetail.networks", "flax", "optax")):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
import numpy as np
from dovetail.evaluation.export import read_exported
policy, carry, actions = read_exported(sys.argv[1]).policy(), None, []
for t, observation in enumerate(np.load(sys.argv[2])):
    action, carry = policy.predict(observation, carry, reward=t)
    actions.append(int(action))
print(actions)
"""
    arguments = [sys.executable, "-c", script, str(folder), str(tmp_path / "observations.npy")]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == greedy_rollout(algorithm, params, observations)


def test_a_policy_without_act_cannot_be_sampled(tmp_path: Path) -> None:
    policy = load(export(tmp_path, bound(Recurrent()), recurrent_params()))
    with pytest.raises(UserError, match="exported without its act"):
        policy.predict(np.zeros(4), deterministic=False)


def test_another_policy_replaces_both_files(tmp_path: Path) -> None:
    params = recurrent_params()
    exporter = PolicyExporter(bound(Recurrent()))
    first = weights(exporter.export(params).write(tmp_path))
    exporter.export({**params, "w": 2 * params["w"]}).write(tmp_path)
    assert weights(tmp_path) != first  # the one file of weights is the new one
    assert load(tmp_path).predict(np.ones(4))[0].shape == ()


def test_a_wrong_observation_is_refused(tmp_path: Path) -> None:
    policy = load(export(tmp_path, bound(Recurrent()), recurrent_params()))
    with pytest.raises(
        UserError, match=r"shape \(2, 5\), but the policy for fake:Env takes \(4,\)"
    ):
        policy.predict(np.zeros((2, 5)))
    with pytest.raises(UserError, match="a dict without numbers in rows"):
        policy.predict({"image": np.zeros(4)})


@pytest.mark.parametrize("which", ["policy.json", "weights"])
def test_a_missing_file_is_refused(tmp_path: Path, which: str) -> None:
    export(tmp_path, bound(Recurrent()), recurrent_params())
    name = weights(tmp_path) if which == "weights" else which
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=f"No exported policy in .*: {name} cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("policy.json", lambda text: text[:-100], "cut short"),
        ("policy.json", lambda text: text.replace(b"fake:Env", b"fake:Enw"), "is not what was"),
        ("policy.json", lambda text: text.replace(b'"format": 2', b'"format": 9'), "has format 9"),
        ("weights", lambda text: text[:-1], "is damaged: it is not what was written"),
        ("weights", lambda text: text[:-1] + b"\x7f", "is damaged: it is not what was written"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, change: Any, sentence: str) -> None:
    export(tmp_path, bound(Recurrent()), recurrent_params())
    file = tmp_path / (weights(tmp_path) if name == "weights" else name)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(UserError, match=sentence):
        load(tmp_path)


def test_files_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    exported = PolicyExporter(bound(Recurrent())).export(recurrent_params())
    for part in ("spaces", "params", "programs"):
        broken = Exported({**exported.record, part: None}, exported.weights)
        with pytest.raises(UserError, match="do not fit together"):
            read_exported(broken.write(tmp_path / part)).policy()
    record = {**exported.record, "weights": {"file": "../weights-0.safetensors", "sha256": ""}}
    (tmp_path / "policy.json").write_text(json.dumps({**record, "digest": digest_of(record)}))
    with pytest.raises(UserError, match="names no file of weights beside it"):
        read_exported(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Cannot write .*policy"):
        export(tmp_path / "file" / "policy", bound(Recurrent()), recurrent_params())


def test_a_platform_it_was_not_exported_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(tmp_path, bound(Recurrent()), recurrent_params())
    monkeypatch.setattr("dovetail.evaluation.programs.platform", lambda: "rocm")
    with pytest.raises(UserError, match="exported for cpu, cuda, tpu, but JAX runs on rocm"):
        load(tmp_path)
