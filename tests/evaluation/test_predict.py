"""A policy takes what the environment shows and gives what it takes, or says what is wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import dovetail.algorithms as algorithms
from dovetail.algorithm import Algorithm, Task, Timestep
from dovetail.envs.own import from_object
from dovetail.errors import UserError
from dovetail.evaluation.export import Origin, PolicyExporter
from dovetail.evaluation.policy import Policy

BOX = spaces.Box(-1, 1, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (8, 8, 3), np.uint8)
GRID = spaces.MultiDiscrete(np.array([[3, 4], [5, 6]]))
MIXED = spaces.Dict(
    {
        "place": spaces.Discrete(4, start=1),
        "image": IMAGE,
        "arm": spaces.Tuple([BOX, spaces.MultiBinary(2)]),
    }
)


def environment(observation: Any, action: Any) -> Any:
    class Random(gymnasium.Env[Any, Any]):
        observation_space, action_space = observation, action

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> Any:
            assert self.action_space.contains(action)
            return self.observation_space.sample(), 0.0, False, False, {}

    return from_object(Random, {}, "test:Random")


def policy_of(algorithm: Algorithm, observation: Any, action: Any) -> tuple[Policy, Any, Any]:
    """(policy with fresh weights, the bound algorithm, its parameters)."""
    env = environment(observation, action)
    bound = algorithm.bind(Task(env.spec, 2, 10))
    params = bound.acting(bound.init(jax.random.key(3)))
    origin = Origin(1200, 30, 12.5, 10)
    return PolicyExporter(bound).export(params, origin).policy(), bound, params


@dataclass(frozen=True)
class Fixed(Algorithm):
    """Gives the same action always: the parameters."""

    def init(self, key: jax.Array) -> Any:
        raise NotImplementedError

    def greedy(self, params: Any, carry: Any, timestep: Timestep) -> tuple[Any, Any]:
        return params, carry


@pytest.mark.parametrize(
    ("action", "chosen", "expected"),
    [
        (spaces.Discrete(5, start=-2), jnp.int32(3), 1),
        (
            spaces.MultiDiscrete(np.array([[3, 4], [5, 6]])),
            jnp.int32([2, 1, 4, 0]),
            [[2, 1], [4, 0]],
        ),
        (spaces.MultiBinary(3), jnp.int32([1, 0, 1]), [1, 0, 1]),
        (spaces.Box(-2, 6, (2,), np.float32), jnp.float32([0.5, 3.0]), [4.0, 6.0]),
        (spaces.Box(0, 10, (1, 2), np.int32), jnp.float32([0.3, -1]), [[6, 0]]),
        (spaces.Box(-np.inf, np.inf, (1,), np.float64), jnp.float32([7.5]), [7.5]),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, spaces.Space) else "",
)
def test_actions_are_those_of_the_environment(action: Any, chosen: Any, expected: Any) -> None:
    env = environment(BOX, action)
    bound = Fixed().bind(Task(env.spec, 2, 10))
    policy = PolicyExporter(bound).export(chosen).policy()
    found, state = policy.predict(BOX.sample())
    np.testing.assert_allclose(found, expected)
    assert action.contains(found) and state is None
    batch, _ = policy.predict(np.stack([BOX.sample()] * 3))
    assert batch.shape == (3, *action.shape) and batch.dtype == action.dtype


CASES: dict[str, tuple[Callable[[], Algorithm], Any, Any]] = {
    "ppo": (lambda: algorithms.PPO(hidden_sizes=(8,)), MIXED, spaces.MultiDiscrete([2, 3])),
    "recurrent ppo": (
        lambda: algorithms.PPO(hidden_sizes=(8,), recurrent=4),
        BOX,
        spaces.Box(-2, 3, (2,), np.float32),
    ),
    "r2d2": (lambda: algorithms.R2D2(), IMAGE, spaces.Discrete(3)),
    "dqn": (lambda: algorithms.DQN(hidden_sizes=(8,)), spaces.Discrete(6), spaces.Discrete(3)),
    "sac": (lambda: algorithms.SAC(hidden_sizes=(8,)), BOX, spaces.Box(-2, 3, (2,), np.float32)),
    "td3": (lambda: algorithms.TD3(hidden_sizes=(8,)), BOX, spaces.Box(-2, 3, (2,), np.float32)),
    "iql": (lambda: algorithms.IQL(hidden_sizes=(8,)), BOX, spaces.Box(-2, 3, (2,), np.float32)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_one_a_batch_and_a_sample(case: str) -> None:
    """One observation acts as its row of a batch does, a batch as the algorithm's own `greedy` in
    the environment's adapter, and samples are in the space."""
    make, observation, action = CASES[case]
    policy, bound, params = policy_of(make(), observation, action)
    observation.seed(0)
    rows = [observation.sample() for _ in range(3)]
    batch = gymnasium.vector.utils.create_empty_array(observation, 3, fn=np.zeros)
    batch = gymnasium.vector.utils.concatenate(observation, rows, batch)
    together, states = policy.predict(batch)
    mapped = environment(observation, action).host(1)._spaces
    encoded = mapped.encode(batch)
    for index, row in enumerate(rows):
        alone, state = policy.predict(row)
        np.testing.assert_allclose(alone, together[index], rtol=1e-5, atol=1e-6)
        assert action.contains(alone)
        assert (state is None) == (states is None) == (not jax.tree.leaves(bound.initial_carry()))
        seen = jax.tree.map(lambda x, i=index: x[i], encoded)
        begun = Timestep(seen, jnp.float32(0), jnp.bool_(True))
        own = bound.greedy(params, bound.initial_carry(), begun)[0]
        expected = mapped.decode(np.asarray(own)[None])[0]
        np.testing.assert_allclose(alone, expected, rtol=1e-5, atol=1e-6)
    sampled, _ = policy.predict(rows[0], deterministic=False)
    assert action.contains(sampled)


def test_a_sample_has_its_log_probability_and_a_seed() -> None:
    policy, bound, params = policy_of(algorithms.PPO(hidden_sizes=(8,)), BOX, spaces.Discrete(3))
    row = np.array([0.1, -0.5, 0.9], np.float32)
    batch = np.stack([row] * 64)
    sampled, _, log_prob = policy.predict(batch, deterministic=False, return_log_prob=True)
    assert set(sampled) == {0, 1, 2} and log_prob.shape == (64,)
    timestep = Timestep(jnp.asarray(row), jnp.float32(0), jnp.bool_(True))
    own = [
        bound.log_prob(params, bound.initial_carry(), timestep, jnp.int32(choice))
        for choice in range(3)
    ]
    np.testing.assert_allclose(log_prob, np.array(own)[sampled], rtol=1e-5)
    again, _ = policy.predict(batch, deterministic=False)
    assert not np.array_equal(again, sampled)
    policy.seed(0)
    first, _ = policy.predict(batch, deterministic=False)
    np.testing.assert_array_equal(first, sampled)
    assert policy.predict(row, deterministic=False, return_log_prob=True)[2].shape == ()


def test_a_memory_is_carried_and_begins_anew_with_an_episode() -> None:
    recurrent = algorithms.PPO(hidden_sizes=(8,), recurrent=4)
    policy, *_ = policy_of(recurrent, BOX, spaces.Box(-2, 3, (2,), np.float32))
    rows = np.random.default_rng(0).uniform(-1, 1, (4, 2, 3)).astype(np.float32)
    _, state = policy.predict(rows[0])
    _, state = policy.predict(rows[1], state)
    action, _ = policy.predict(rows[2], state, np.array([False, True]))
    fresh, _ = policy.predict(rows[2])
    np.testing.assert_allclose(action[1], fresh[1], rtol=1e-6)
    assert not np.allclose(action[0], fresh[0])
    _, alone = policy.predict(rows[0, 0])
    _, alone = policy.predict(rows[1, 0], alone)
    np.testing.assert_allclose(policy.predict(rows[2, 0], alone)[0], action[0], rtol=1e-5)


def test_its_name_says_what_it_is() -> None:
    policy, *_ = policy_of(algorithms.DQN(hidden_sizes=(8,)), MIXED, spaces.Discrete(2))
    assert repr(policy) == (
        "Policy(DQN on test:Random, step 1,200, mean return 12.5: Dict(arm: Tuple(Box(3,) float32, "
        "MultiBinary(2)), image: Box(8, 8, 3) uint8, place: Discrete(4, start=1)) → Discrete(2))"
    )


@pytest.fixture(scope="module")
def plain() -> Policy:
    return policy_of(algorithms.PPO(hidden_sizes=(4,)), BOX, spaces.Discrete(2))[0]


@pytest.fixture(scope="module")
def recurrent() -> Policy:
    made = algorithms.PPO(hidden_sizes=(4,), recurrent=2)
    return policy_of(made, BOX, spaces.Discrete(2))[0]


@pytest.fixture(scope="module")
def mixed() -> Policy:
    return policy_of(algorithms.DQN(hidden_sizes=(4,)), MIXED, spaces.Discrete(2))[0]


@pytest.fixture(scope="module")
def deterministic() -> Policy:
    space = spaces.Box(-1, 1, (1,), np.float32)
    return policy_of(algorithms.TD3(hidden_sizes=(4,)), BOX, space)[0]


ONE: dict[str, Any] = {
    "place": 2,
    "image": np.zeros((8, 8, 3), np.uint8),
    "arm": (np.zeros(3, np.float32), np.zeros(2, np.int8)),
}


@pytest.mark.parametrize(
    ("kind", "arguments", "sentence"),
    [
        ("plain", [np.zeros(5)], r"has shape \(5,\), but the policy for test:Random takes \(3,\)"),
        ("plain", [np.zeros((2, 2, 3))], r"has shape \(2, 2, 3\), but .* or a batch of them"),
        ("plain", [np.zeros((0, 3))], "The observation is empty"),
        ("plain", [{"x": 1}], "is a dict without numbers in rows, but .* takes Box"),
        ("plain", [[[1, 2, 3], [1]]], "is a list without numbers in rows"),
        ("mixed", [np.zeros(3)], "is a ndarray, but .* takes a dict with the key 'arm'"),
        ("mixed", [{**ONE, "arm": 1}], "part 'arm' is a int, but .* takes a tuple"),
        ("mixed", [{**ONE, "place": 9}], r"part 'place' holds \[9\], which is outside Discrete"),
        ("mixed", [{**ONE, "place": [1, 2]}], "are not of one batch"),
        ("recurrent", [np.zeros((2, 3)), (np.zeros(2),)], "does not belong to a batch of 2"),
        ("recurrent", [np.zeros(3), (np.zeros((1, 2)),)], "does not belong to one observation"),
    ],
)  # fmt: skip
def test_what_it_cannot_take_is_a_sentence(
    request: pytest.FixtureRequest, kind: str, arguments: list[Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        request.getfixturevalue(kind).predict(*arguments)


def test_a_log_probability_that_there_is_not_is_a_sentence(
    plain: Policy, deterministic: Policy
) -> None:
    with pytest.raises(UserError, match="that of a sampled action: give deterministic=False"):
        plain.predict(np.zeros(3), return_log_prob=True)
    with pytest.raises(UserError, match="TD3 does not tell the probabilities"):
        deterministic.predict(np.zeros(3), deterministic=False, return_log_prob=True)
