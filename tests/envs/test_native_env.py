"""Our own JAX environments: against Gymnasium's, and against written values."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.envs import check_jax_env, resolve
from dovetail.envs.native import CartPole, CartPoleState, Chain, MemoryCue
from dovetail.errors import UserError

KEY = jax.random.key(0)


@pytest.mark.parametrize("env", [CartPole(limit=20), MemoryCue(length=3), Chain(3, 2)])
def test_it_conforms(env):
    check_jax_env(env, steps=60)


def test_cartpole_steps_like_gymnasiums_for_whole_episodes():
    reference = gymnasium.make("CartPole-v1").unwrapped
    step = jax.jit(CartPole().step)
    generator = np.random.default_rng(0)
    ends = 0
    for episode in range(5):
        observation, _ = reference.reset(seed=episode)
        state = CartPoleState(jnp.asarray(observation), jnp.int32(0))
        for _ in range(200):
            action = int(generator.integers(2))
            observation, reward, terminated, _, _ = reference.step(action)
            after = step(state, jnp.int32(action), KEY)
            np.testing.assert_allclose(after.observation, observation, rtol=1e-4, atol=1e-5)
            assert float(after.reward) == reward == 1.0
            assert bool(after.terminated) == terminated
            state = after.state
            if terminated:
                ends += 1
                break
    assert ends == 5


def test_cartpole_begins_within_its_bounds():
    starts = jax.vmap(lambda key: CartPole().reset(key)[1])(jax.random.split(KEY, 1000))
    assert -0.05 <= starts.min() < -0.049 and 0.049 < starts.max() <= 0.05


def test_cartpole_is_truncated_at_its_limit_and_not_before():
    step = jax.jit(CartPole().step)
    state = CartPoleState(jnp.zeros(4), jnp.int32(498))
    before = step(state, jnp.int32(0), KEY)
    at = step(before.state, jnp.int32(1), KEY)
    assert not before.truncated and at.truncated and not at.terminated


def test_cartpole_that_falls_at_its_limit_is_terminated_only():
    state = CartPoleState(jnp.array([2.39, 5.0, 0.0, 0.0]), jnp.int32(499))
    after = CartPole().step(state, jnp.int32(1), KEY)
    assert after.terminated and not after.truncated


def test_chain_pays_at_the_end_and_terminates():
    env = Chain(length=4, limit=9)
    state, observation = env.reset(KEY)
    assert observation.tolist() == [1, 0, 0, 0]
    rewards, ends = [], []
    for _ in range(3):
        after = env.step(state, jnp.int32(1), KEY)
        state = after.state
        rewards.append(float(after.reward))
        ends.append(bool(after.terminated))
    assert rewards == [0, 0, 1] and ends == [False, False, True]
    assert after.observation.tolist() == [0, 0, 0, 1] and not after.truncated


def test_chain_is_truncated_where_one_stands():
    env = Chain(length=4, limit=2)
    state, _ = env.reset(KEY)
    first = env.step(state, jnp.int32(0), KEY)
    second = env.step(first.state, jnp.int32(1), KEY)
    assert not first.truncated and first.observation.tolist() == [1, 0, 0, 0]
    assert second.truncated and not second.terminated
    assert second.observation.tolist() == [0, 1, 0, 0] and float(second.reward) == 0


def cue_episode(env: MemoryCue, key: jax.Array, answer: int) -> tuple[np.ndarray, list[float]]:
    state, observation = env.reset(key)
    seen, rewards = [observation], []
    for t in range(env.length + 1):
        after = env.step(state, jnp.int32(answer), key)
        state = after.state
        seen.append(after.observation)
        rewards.append(float(after.reward))
        assert bool(after.terminated) == (t == env.length)
    return np.array(seen), rewards


def test_memory_cue_shows_the_cue_once_and_asks_for_it_at_the_end():
    env = MemoryCue(length=3)
    seen, rewards = cue_episode(env, KEY, 0)
    cue = int(seen[0, :2].argmax())
    assert seen[0].tolist() == [1 - cue, cue, 0]
    assert seen[1:4].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 1]]
    assert rewards == [0, 0, 0, float(cue == 0)]
    assert cue_episode(env, KEY, cue)[1][-1] == 1


def test_memory_cue_cannot_be_solved_without_memory():
    cues = jax.vmap(lambda key: MemoryCue().reset(key)[0].cue)(jax.random.split(KEY, 2000))
    assert 0.45 < float(jnp.mean(cues)) < 0.55


def test_options_show_in_the_id_and_in_the_threshold():
    assert resolve("dovetail:CartPole-v1").spec.threshold == 475
    env = resolve("dovetail:CartPole-v1?limit=100")
    assert env.spec.id == "dovetail:CartPole-v1?limit=100" and env.spec.threshold is None
    assert resolve("dovetail:MemoryCue-v0?length=2&cues=4").spec.observation.shape == (5,)


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ("dovetail:Chian-v0", "no environment 'Chian-v0' in dovetail: did you mean 'Chain-v0'"),
        ("dovetail:Chain-v0?lenght=3", "no option 'lenght': did you mean 'length'"),
        ("dovetail:Chain-v0?length=0", "whole number of at least 1 for length"),
    ],
)
def test_mistakes_are_sentences(env, sentence):
    with pytest.raises(UserError, match=sentence):
        resolve(env)
