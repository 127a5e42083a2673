"""Gymnasium behind our interface: every mode, true final observations, sentences for failures."""

import pickle
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from dovetail.envs import check_host_env, resolve
from dovetail.envs.gymnasium import created
from dovetail.envs.interface import Discrete, HostEnv, HostStep
from dovetail.errors import UserError

SEEDS = [3, 14, 15]
MODES = [
    "CartPole-v1?max_episode_steps=15",
    "CartPole-v1?max_episode_steps=15&vectorization=sync&autoreset=same_step",
    "CartPole-v1?max_episode_steps=15&vectorization=sync&autoreset=next_step",
    "CartPole-v1?max_episode_steps=15&vectorization=sync&autoreset=disabled",
]
ASYNC = [
    "Pendulum-v1?max_episode_steps=6&vectorization=async&autoreset=same_step",
    "Pendulum-v1?max_episode_steps=6&vectorization=async&autoreset=next_step",
    "Pendulum-v1?max_episode_steps=6&vectorization=async&autoreset=disabled",
]


def host(env: Any, num_envs: int = 3) -> HostEnv:
    factory = resolve(env).host
    assert factory is not None
    return factory(num_envs)


def bare_episode(name: str, limit: int, seed: int, actions: Any) -> tuple[list[Any], bool, bool]:
    """The observations of one bare environment until its episode ends, and how it ended."""
    env = gymnasium.make(name, max_episode_steps=limit)
    observation, _ = env.reset(seed=seed)
    seen = [observation]
    for action in actions:
        observation, _, terminated, truncated, _ = env.step(action)
        seen.append(observation)
        if terminated or truncated:
            return seen, terminated, truncated
    raise AssertionError("the episode should have ended")


@pytest.mark.parametrize("env", [*MODES, "FrozenLake-v1", "Pendulum-v1?max_episode_steps=7"])
def test_it_conforms(env):
    check_host_env(resolve(env).host, steps=60)


@pytest.mark.parametrize("env", ASYNC)
def test_async_conforms_and_delivers_the_true_final_observation(env):
    check_host_env(resolve(env).host, steps=15, independent=False)
    batch = host(env, 2)
    batch.reset(SEEDS[:2])
    for t in range(6):
        step = batch.step(np.full((2, 1), 0.5, np.float32))
        assert step.truncated.tolist() == [t == 5] * 2
    final = step.next_observation.copy()
    batch.close()
    for i in range(2):
        seen, _, _ = bare_episode("Pendulum-v1", 6, SEEDS[i], [np.array([1.0], np.float32)] * 6)
        np.testing.assert_allclose(final[i], seen[-1], rtol=1e-6)


@pytest.mark.parametrize("env", MODES)
def test_every_mode_follows_a_bare_environment_to_its_true_end(env):
    """Alternating pushes survive until the limit in some environments and fall in none."""
    batch = host(env)
    first = batch.reset(SEEDS)
    episodes = [bare_episode("CartPole-v1", 15, seed, [t % 2 for t in range(15)]) for seed in SEEDS]
    np.testing.assert_allclose(first, [seen[0] for seen, _, _ in episodes], rtol=1e-6)
    for t in range(15):
        step = batch.step(np.full(3, t % 2, np.int32))
        expected = [seen[t + 1] for seen, _, _ in episodes]
        np.testing.assert_allclose(step.next_observation, expected, rtol=1e-5, atol=1e-6)
        assert step.truncated.tolist() == [t == 14] * 3 and not step.terminated.any()
    batch.close()


def ends_of(env: str) -> list[HostStep]:
    """The last step of the first episode, and the one after it, pushing right all the time."""
    batch = host(env, 1)
    batch.reset([7])
    while True:
        step = batch.step(np.ones(1, np.int32))
        if step.terminated[0]:
            last = HostStep(*(x.copy() for x in step[:7]))
            after = batch.step(np.ones(1, np.int32))
            batch.close()
            return [last, after]


def test_same_step_autoreset_shows_both_ends_at_once():
    last, after = ends_of("CartPole-v1?vectorization=sync&autoreset=same_step")
    assert last.first.tolist() == [True] and last.valid.tolist() == [True]
    assert abs(last.next_observation[0, 2]) > 0.2 and abs(last.observation[0, 2]) <= 0.05
    assert after.valid.tolist() == [True] and after.reward.tolist() == [1.0]


@pytest.mark.parametrize("how", ["vector_entry_point", "sync"])
def test_next_step_autoreset_marks_the_step_that_only_reset(how):
    last, after = ends_of(f"CartPole-v1?vectorization={how}&autoreset=next_step")
    assert last.first.tolist() == [False] and abs(last.observation[0, 2]) > 0.2
    assert after.valid.tolist() == [False] and after.first.tolist() == [True]
    assert after.reward.tolist() == [0.0] and abs(after.observation[0, 2]) <= 0.05


def test_disabled_autoreset_resets_only_what_ended():
    batch = host("CartPole-v1?vectorization=sync&autoreset=disabled", 2)
    batch.reset([0, 1])
    while True:
        step = batch.step(np.array([1, 0], np.int32))
        if step.first.any():
            break
    same = np.all(step.observation == step.next_observation, axis=1)
    assert same.tolist() == (~step.first).tolist()
    assert np.abs(step.observation[step.first, 2]).max() <= 0.05
    batch.close()


def test_the_entry_point_does_the_same_as_single_environments():
    """Every random stream belongs to its environment, resets included."""
    fast, slow = host("CartPole-v1"), host("CartPole-v1?vectorization=sync&autoreset=next_step")
    np.testing.assert_array_equal(fast.reset(SEEDS), slow.reset(SEEDS))
    generator = np.random.default_rng(0)
    ends = 0
    for _ in range(120):
        action = generator.integers(0, 2, 3, np.int32)
        one, other = fast.step(action), slow.step(action)
        ends += int(one.first.sum())
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert ends > 5


def test_an_episode_that_falls_at_its_limit_is_terminated_only():
    batch = host("CartPole-v1?max_episode_steps=8", 1)
    batch.reset([0])
    for _ in range(8):
        step = batch.step(np.ones(1, np.int32))
    assert (step.terminated.tolist(), step.truncated.tolist()) == ([True], [False])


@pytest.mark.parametrize(
    ("env", "threshold"),
    [
        ("CartPole-v1", 475.0),
        ("Acrobot-v1", -100.0),
        ("Pendulum-v1", -200.0),
        ("FrozenLake-v1", 0.7),
        ("CartPole-v1?max_episode_steps=10", None),
        ("CartPole-v1?vectorization=sync", 475.0),
    ],
)
def test_thresholds(env, threshold):
    assert resolve(env).spec.threshold == threshold


def test_actions_outside_minus_one_to_one_are_clipped():
    one, other = host("Pendulum-v1", 1), host("Pendulum-v1", 1)
    one.reset([0])
    other.reset([0])
    at, beyond = np.ones((1, 1), np.float32), np.full((1, 1), 9, np.float32)
    np.testing.assert_array_equal(one.step(at).observation, other.step(beyond).observation)


def test_box2d_loads_though_warnings_are_errors():
    check_host_env(resolve("LunarLander-v3?max_episode_steps=9").host, steps=20)


class Odd(gymnasium.vector.VectorEnv):
    """Ends every second step; pays for resets; says of its autoreset mode what it is told."""

    def __init__(self, num_envs: int, metadata: dict[str, Any]) -> None:
        self.num_envs, self.metadata = num_envs, metadata
        self.single_observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return np.zeros((self.num_envs, 1)), {}

    def step(self, actions):
        self.time += 1
        ends, no = np.full(self.num_envs, self.time % 3 == 2), np.zeros(self.num_envs, np.bool_)
        return np.zeros((self.num_envs, 1)), np.full(self.num_envs, 5), ends, no, {}


def odd(metadata: dict[str, Any]) -> HostEnv:
    def build(num_envs: int) -> Odd:
        return Odd(num_envs, metadata)

    return host(build, 1)


def test_a_step_that_only_resets_pays_nothing():
    batch = odd({"autoreset_mode": AutoresetMode.NEXT_STEP})
    batch.reset([0])
    steps = [batch.step(np.zeros(1, np.int32)) for _ in range(4)]
    assert [float(step.reward[0]) for step in steps] == [5, 5, 0, 5]
    assert [bool(step.valid[0]) for step in steps] == [True, True, False, True]
    assert steps[0].observation.dtype == np.float32


def test_same_step_autoreset_without_a_final_observation_is_refused():
    batch = odd({"autoreset_mode": AutoresetMode.SAME_STEP})
    batch.reset([0])
    batch.step(np.zeros(1, np.int32))
    with pytest.raises(UserError, match=r"environment 0 ended .* without infos\['final_obs'\]"):
        batch.step(np.zeros(1, np.int32))


def test_a_vector_environment_must_say_how_it_resets():
    with pytest.raises(UserError, match="does not say how it resets finished episodes"):
        odd({})


class Faulty(gymnasium.Env):
    """Does something wrong at its third step, in the environment with an odd seed."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.odd = 0, seed is not None and seed % 2 == 1
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        observation: Any = np.zeros(2, np.float32)
        reward = 0.0
        if self.odd and self.time == 3:
            match self.fault:
                case "raise":
                    raise ValueError("out of fuel")
                case "nan":
                    observation[1] = np.nan
                case "shape":
                    observation = np.zeros(3, np.float32)
                case "dtype":
                    observation = np.zeros(2, np.complex64)
                case _:
                    reward = float("inf")
        return observation, reward, False, False, {}


def faulty_run(fault: str, query: str = "") -> None:
    from dovetail.envs.own import from_object

    options = {"fault": fault, **({"vectorization": query} if query else {})}
    factory = from_object(Faulty, options, "python:Faulty").host
    assert factory is not None
    batch = factory(4)
    batch.reset([0, 2, 5, 6])
    try:
        for _ in range(4):
            batch.step(np.zeros(4, np.int32))
    finally:
        batch.close()


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("raise", "python:Faulty: environment 2 raised ValueError in step at step 3: out of fuel"),
        ("nan", r"python:Faulty: environment 2 returned the observation \[0.0, nan\].*\(step 3\)"),
        ("shape", r"environment 2 returned an observation float32\[3\] where its space is .*\[2\]"),
        ("dtype", r"environment 2 returned an observation complex64\[2\] where its space"),
        ("reward", r"environment 2 returned the reward inf, which is not finite.*\(step 3\)"),
    ],
)
def test_a_faulty_environment_is_named(fault, sentence):
    with pytest.raises(UserError, match=sentence):
        faulty_run(fault)


def test_a_fault_in_another_process_is_named():
    with pytest.raises(UserError, match="environment 2 raised ValueError in step at step 3"):
        faulty_run("raise", "async")


def test_a_diverged_algorithm_is_blamed_rather_than_the_environment():
    batch = host("Pendulum-v1", 2)
    batch.reset([0, 1])
    with pytest.raises(UserError, match=r"environment 1 was given the action \[nan\].*diverged"):
        batch.step(np.array([[0.0], [np.nan]], np.float32))


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ("gymnasium:Hopper", "no environment 'Hopper' in Gymnasium: did you mean 'Hopper-v"),
        ("CartPole-v1?vectorization=synk", "vectorization=synk: did you mean 'sync'"),
        ("CartPole-v1?autoreset=never", "autoreset=never"),
        ("Acrobot-v1?vectorization=vector_entry_point", "has no vector entry point"),
        (
            "CartPole-v1?vectorization=vector_entry_point&autoreset=same_step",
            "resets by next_step when its vector entry point steps it: use vectorization=sync",
        ),
        ("Acrobot-v1?gravity=3", "could not be made: TypeError"),
    ],
)
def test_mistakes_are_sentences(env, sentence):
    with pytest.raises(UserError, match=sentence):
        host(env)


def test_a_missing_extra_is_named():
    def build() -> None:
        raise gymnasium.error.DependencyNotInstalled("MuJoCo is not installed, run pip install …")

    with pytest.raises(UserError, match=r"needs mujoco.*pip install 'dovetail\[mujoco\]'"):
        created(build, "gymnasium:Ant-v5")


def test_factories_can_be_sent_to_other_processes():
    for env in ("CartPole-v1", "Acrobot-v1?autoreset=next_step"):
        factory = pickle.loads(pickle.dumps(resolve(env).host))
        assert factory(2).reset([0, 1]).shape[0] == 2


def test_seeds_are_counted():
    with pytest.raises(UserError, match="has 3 environments but was given 1 seeds"):
        host("CartPole-v1").reset([1])


@pytest.mark.parametrize(
    "name", ["CartPole-v1", "Pendulum-v1", "CartPole-v1?autoreset=same_step", "Acrobot-v1"]
)
def test_one_environment_alone_does_what_it_does_among_others(name: str) -> None:
    factory = resolve(f"gymnasium:{name}").host
    assert factory is not None
    together, alone = factory(3), [factory(1) for _ in range(3)]
    shown = together.reset(SEEDS[:3])
    for i, host in enumerate(alone):
        assert (host.reset(SEEDS[i : i + 1]) == shown[i]).all()
    rng, ends = np.random.default_rng(0), 0
    for _ in range(250):
        discrete = isinstance(together.spec.action, Discrete)
        action = rng.integers(2, size=3) if discrete else rng.uniform(-1, 1, (3, 1))
        action = action.astype(np.int32 if discrete else np.float32)
        step = jax.tree.map(np.copy, together.step(action))
        ends += int((step.terminated | step.truncated).sum())
        for i, host in enumerate(alone):
            own = host.step(action[i : i + 1])
            for field in set(step._fields) - {"info"}:
                found, wanted = getattr(own, field)[0], getattr(step, field)[i]
                np.testing.assert_allclose(found, wanted, atol=1e-6, err_msg=field)
    assert ends > 0 or name == "Acrobot-v1"
    for host in (together, *alone):
        host.close()
