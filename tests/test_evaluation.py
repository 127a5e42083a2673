"""Evaluation counts the right episodes, in every autoreset mode, and can be stopped."""

import threading
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import Decoder, Forgetful, Mapped
from toys import Drift, Toy

from dovetail.algorithm import Algorithm, Task, Timestep
from dovetail.envs.interface import Discrete, EnvSpec, HostStep, JaxStep
from dovetail.envs.resolve import Env, resolve
from dovetail.errors import UserError
from dovetail.evaluation.evaluate import Evaluation, Evaluator, _own_seeds, evaluate

SPEC = EnvSpec("fake:Count", jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(99))


@dataclass(frozen=True)
class Counter(Algorithm):
    """Acts with the number of steps since the episode began, if all it was shown is consistent."""

    def initial_carry(self) -> jax.Array:
        return jnp.int32(0)

    def greedy(self, params: Any, carry: jax.Array, timestep: Timestep) -> tuple[Any, Any]:
        consistent = timestep.first == (carry == 0)
        consistent &= timestep.reward == jnp.where(carry == 0, 0, 1)
        consistent &= timestep.observation[0] == carry
        return jnp.where(consistent, carry + params, 98), carry + 1


class CountHost:
    """Rewards 1 for the action that numbers the episode's step, else -100.

    Environment i's episodes last `lengths[i]` steps; None: for ever.
    """

    spec = SPEC

    def __init__(self, lengths: list[int | None], autoreset: str) -> None:
        self.num_envs = len(lengths)
        self.lengths = np.array([length or 10**9 for length in lengths])
        self.autoreset = autoreset
        self.closed = 0

    def reset(self, seeds: list[int]) -> np.ndarray:
        self.seeds = seeds
        self.count = np.zeros(self.num_envs, int)
        self.must_reset = np.zeros(self.num_envs, bool)
        return self.count[:, None].astype(np.float32)

    def step(self, action: np.ndarray) -> HostStep:
        reward = np.where(action == self.count, 1.0, -100.0)
        resets = self.must_reset.copy()
        count = np.where(resets, 0, self.count + 1)
        done = ~resets & (count >= self.lengths)
        if self.autoreset == "same step":
            self.count, first = np.where(done, 0, count), done
        else:
            self.must_reset, self.count, first = done, count, resets
        even = np.arange(self.num_envs) % 2 == 0
        seen = self.count[:, None].astype(np.float32)
        return HostStep(
            seen, count[:, None], reward, done & even, done & ~even, first, valid=~resets
        )

    def close(self) -> None:
        self.closed += 1


class CountJax:
    """The same for JAX; an episode's length, 1 to 9, is drawn when it begins."""

    spec = SPEC

    def __init__(self, endless: bool = False) -> None:
        self.endless = endless

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        length = jnp.where(self.endless, 10**9, jax.random.randint(key, (), 1, 10))
        return (jnp.int32(0), length), jnp.zeros(1)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> JaxStep:
        count, length = state
        reward = jnp.where(action == count, 1.0, -100.0)
        done = count + 1 >= length
        cut = done & (length % 2 == 0)
        seen = jnp.full(1, count + 1.0)
        return JaxStep((count + 1, length), seen, reward, done & ~cut, cut)


@dataclass(frozen=True)
class Linear(Algorithm):
    """Pushes toward the side that its parameters point to."""

    def greedy(self, params: Any, carry: Any, timestep: Timestep) -> tuple[Any, Any]:
        return (timestep.observation @ params > 0).astype(jnp.int32), carry


def counter() -> Algorithm:
    return Counter().bind(Task(SPEC, num_envs=2, steps=10))


def host(lengths: list[int | None], autoreset: str = "same step") -> tuple[Env, CountHost]:
    made = CountHost(lengths, autoreset)
    return Env(SPEC, None, lambda num_envs: made), made


def traced(endless: bool = False) -> Env:
    return Env(SPEC, CountJax(endless), None)


@pytest.mark.parametrize("autoreset", ["same step", "next step"])
def test_every_host_environment_plays_its_share(autoreset: str) -> None:
    env, made = host([1, 3, 9], autoreset)
    result = evaluate(counter(), jnp.int32(0), env, episodes=7, num_envs=3)
    assert result.lengths.tolist() == [1, 1, 1, 3, 3, 9, 9]
    assert result.returns.tolist() == [1, 1, 1, 3, 3, 9, 9]
    assert result.cut == 0
    assert result.mean == pytest.approx(27 / 7)
    assert made.closed == 1


@pytest.mark.parametrize("autoreset", ["same step", "next step"])
def test_parameters_reach_the_policy(autoreset: str) -> None:
    env, _ = host([2, 2], autoreset)
    result = evaluate(counter(), jnp.int32(1), env, episodes=2, num_envs=2)
    assert result.returns.tolist() == [-200, -200]


def test_an_endless_host_episode_is_cut_at_the_step_limit() -> None:
    env, _ = host([None, 2])
    result = evaluate(counter(), jnp.int32(0), env, episodes=4, num_envs=2, max_steps=5)
    assert result.lengths.tolist() == [5, 5, 2, 2]
    assert result.cut == 2


def test_jax_environments_play_one_episode_each() -> None:
    env = traced()
    result = evaluate(counter(), jnp.int32(0), env, episodes=300, seed=3)
    np.testing.assert_array_equal(result.returns, result.lengths)
    assert (result.lengths.min(), result.lengths.max(), result.cut) == (1, 9, 0)
    assert abs(result.mean - 5) < 3 * 2.6 / 300**0.5
    short = evaluate(counter(), jnp.int32(0), env, episodes=300, seed=3, max_steps=4)
    np.testing.assert_array_equal(short.lengths, np.minimum(result.lengths, 4))
    assert short.cut == (result.lengths > 4).sum()


def test_jax_episodes_longer_than_one_call_go_on() -> None:
    env = traced(endless=True)
    result = evaluate(counter(), jnp.int32(0), env, episodes=2, max_steps=150)
    assert result.lengths.tolist() == [150, 150]
    assert result.cut == 2
    assert result.returns.tolist() == [150.0, 150.0]


def test_a_call_repeats_and_another_seed_does_not() -> None:
    env = traced()
    evaluator = Evaluator(counter(), env, episodes=40, seed=1)
    once, again = evaluator(jnp.int32(0)), evaluator(jnp.int32(0))
    other = evaluate(counter(), jnp.int32(0), env, episodes=40, seed=2)
    assert once is not None and again is not None
    np.testing.assert_array_equal(once.lengths, again.lengths)
    assert (once.lengths != other.lengths).any()


def test_own_seeds_are_evaluations_own() -> None:
    env, made = host([1] * 4)
    evaluate(counter(), jnp.int32(0), env, episodes=4, seed=7)
    assert made.seeds == _own_seeds(7, 4)
    assert len({*made.seeds, *_own_seeds(8, 4), *range(8)}) == 16
    assert all(0 <= seed < 2**31 for seed in made.seeds)


@pytest.mark.parametrize("kind", ["host", "jax"])
def test_cancel_ends_an_endless_evaluation(kind: str) -> None:
    env = host([None])[0] if kind == "host" else traced(endless=True)
    evaluator = Evaluator(counter(), env, episodes=1, max_steps=10**9)
    results: list[Evaluation | None] = []
    thread = threading.Thread(target=lambda: results.append(evaluator(jnp.int32(0))))
    thread.start()
    evaluator.cancel()
    thread.join(60)
    assert results == [None]
    assert evaluator(jnp.int32(0)) is None
    evaluator.close()


def test_close_waits_for_the_evaluation_under_way() -> None:
    env, made = host([None])
    evaluator = Evaluator(counter(), env, episodes=1, max_steps=10**9)
    thread = threading.Thread(target=evaluator, args=(jnp.int32(0),))
    thread.start()
    evaluator.close()
    evaluator.close()
    thread.join(60)
    assert not thread.is_alive()
    assert made.closed <= 1


@pytest.mark.parametrize("name", ["gymnasium:CartPole-v1", "dovetail:CartPole-v1"])
def test_cartpole_brings_the_known_returns(name: str) -> None:
    env = resolve(name)
    algorithm = Linear().bind(Task(env.spec, num_envs=1, steps=1))
    evaluator = Evaluator(algorithm, env, episodes=30, num_envs=10)
    balanced = evaluator(jnp.array([0.0, 0.0, 3.0, 1.0]))
    falling = evaluator(jnp.zeros(4))
    evaluator.close()
    assert balanced is not None and falling is not None
    assert balanced.returns.tolist() == [500.0] * 30
    assert 9.0 < falling.mean < 9.8
    assert {8, 9, 10} <= set(falling.lengths.tolist()) <= {8, 9, 10, 11}
    assert falling.interval[0] < 9.34 < falling.interval[1]


def test_the_interval_is_the_means() -> None:
    evaluation = Evaluation(np.array([1.0, 3.0, 5.0, 7.0]), np.ones(4, int), 0)
    assert evaluation.mean == 4.0
    assert evaluation.interval == pytest.approx((2.0, 6.0), abs=0.51)
    # 500 is the most that CartPole gives; the normal approximation says up to 543.
    returns = np.array([500.0] * 9 + [60.0])
    low, high = Evaluation(returns, np.ones(10, int), 0).interval
    assert 300 < low < 456 < high <= 500
    assert Evaluation(np.ones(1), np.ones(1, int), 0).interval == (-np.inf, np.inf)


def test_wrong_numbers_are_refused() -> None:
    env, _ = host([1])
    with pytest.raises(UserError, match="episodes=0: give 1 or more"):
        Evaluator(counter(), env, episodes=0)
    with pytest.raises(UserError, match="num_envs=9 for 3 episodes"):
        Evaluator(counter(), env, episodes=3, num_envs=9)


@pytest.mark.parametrize("explore", [False, True])
@pytest.mark.parametrize("name", ["drift", "gymnasium:CartPole-v1?vectorization=sync"])
def test_a_batch_is_played_as_one_by_one(name: str, explore: bool) -> None:
    env = resolve(Drift() if name == "drift" else name)
    task, params = Task(env.spec, num_envs=1, steps=1), {"w": jnp.array([[1.0, -1], [0.5, 1]] * 2)}
    found = [
        evaluate(kind().bind(task), params, env, episodes=12, max_steps=60, explore=explore)
        for kind in (Mapped, Decoder, Forgetful)
    ]
    for one in found[1:]:
        np.testing.assert_allclose(one.returns, found[0].returns, 1e-5)
        assert one.lengths.tolist() == found[0].lengths.tolist()
    assert len(set(found[0].lengths.tolist())) > 3


def test_an_algorithm_without_a_greedy_act_is_refused() -> None:
    env = resolve(Drift())
    algorithm = Toy().bind(Task(env.spec, num_envs=1, steps=1))
    with pytest.raises(UserError, match="Toy defines neither greedy nor greedy_batch, by which"):
        Evaluator(algorithm, env, episodes=2)
    Evaluator(algorithm, env, episodes=2, explore=True)
