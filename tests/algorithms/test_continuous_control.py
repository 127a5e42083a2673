"""DDPG, D4PG, TD3 and SAC: what they learn from, what their critics are told, what they refuse."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import Started, numbers

import dovetail as dt
from dovetail.algorithm import Algorithm
from dovetail.algorithms import D4PG, DDPG, SAC, TD3, SACDiscrete
from dovetail.blocks import gradient_loop
from dovetail.blocks.gradient_loop import KEYS
from dovetail.blocks.replayed import Batch, Row
from dovetail.blocks.targets import random_subset
from dovetail.envs.interface import Continuous, EnvSpec
from dovetail.errors import UserError
from dovetail.functions.value_distributions import expected
from dovetail.replay.sample import ItemKeys, Sample

PENDULUM = dt.envs.resolve("gymnax:Pendulum-v1").spec
CARTPOLE = dt.envs.resolve("dovetail:CartPole-v1").spec
ALONE: Any = SimpleNamespace(
    mean=lambda tree: tree, max=lambda tree: tree, own_keys=lambda keys, items: keys
)
TINY: dict[str, Any] = {
    "hidden_sizes": (4,),
    "buffer_size": 64,
    "learning_starts": 1,
    "batch_size": 3,
}


def bound(kind: Any, env: EnvSpec = PENDULUM, num_envs: int = 2, **options: Any) -> Any:
    return kind(**TINY | options).bind(dt.Task(env, num_envs=num_envs, steps=1000))


def random_batch(count: int = 3, env: EnvSpec = PENDULUM) -> Batch:
    draw = np.random.default_rng(0).normal
    shape = env.observation.shape
    continuous = isinstance(env.action, Continuous)
    return Batch(
        observation=jnp.asarray(draw(size=(count, *shape)), jnp.float32),
        action=jnp.full((count, 1), 0.5) if continuous else jnp.arange(count) % 2,
        reward=jnp.linspace(-1.0, 1.0, count),
        discount=jnp.full(count, 0.9).at[0].set(0.0),
        following=jnp.asarray(draw(size=(count, *shape)), jnp.float32),
        weights=jnp.ones(count),
    )


def batches(batch: Batch, count: int = 1) -> Batch:
    """A batch in so many equal parts."""
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)


def begun(algorithm: Algorithm) -> Any:
    """A first state whose target networks differ from the networks."""
    state = jax.jit(algorithm.init)(jax.random.key(0))
    other = jax.jit(algorithm.init)(jax.random.key(1))
    return state._replace(target=other.target)


def keys() -> jax.Array:
    return jax.random.split(jax.random.key(5), KEYS)


def test_an_ended_episode_counts_no_further_and_a_cut_one_does() -> None:
    """Three items of up to two steps: a whole one, one that terminated, one cut by a limit."""
    rows = Row(
        observation=jnp.arange(27, dtype=jnp.float32).reshape(3, 3, 3),
        action=jnp.arange(9, dtype=jnp.float32).reshape(3, 3, 1),
        reward=jnp.array([[1.0, 10.0, 100.0]] * 3),
        terminated=jnp.array([[False, False, False], [False, True, False], [False] * 3]),
    )
    mask = jnp.array([[True, True, False], [True, True, False], [True, False, False]])
    ones = jnp.ones(3)
    sample = Sample(rows, mask, ItemKeys(ones, ones), ones, jnp.full(3, 3), ones)
    algorithm = bound(DDPG, n_step=2, gamma=0.5)
    batch = algorithm.sampling.batch(ALONE, begun(algorithm).moments, sample)
    np.testing.assert_allclose(batch.reward, [6.0, 6.0, 1.0])
    np.testing.assert_allclose(batch.discount, [0.25, 0.0, 0.5])
    np.testing.assert_allclose(batch.following, rows.observation[jnp.arange(3), mask.sum(1)])
    np.testing.assert_allclose(batch.action[:, 0], [0.0, 3.0, 6.0])
    np.testing.assert_allclose(batch.weights, [1.0, 1.0, 1.0])


def test_a_time_limit_leads_to_the_true_last_observation() -> None:
    env = "gymnax:Pendulum-v1?max_steps_in_episode=5"
    algorithm = SAC(**TINY, num_envs=2, unroll_length=6, gradient_steps=1)
    with Started(algorithm, env, dt.strategies.Fused()) as running:
        running.advance(3)
        _, sample = running.state.replay.sample((jnp.arange(40)[None] + 0.5) / 40)
        first, moments = jax.tree.map(lambda x: x[0], sample), running.state.moments
        batch = bound(SAC).sampling.batch(ALONE, moments, first)
    np.testing.assert_allclose(batch.discount, np.full(40, 0.99), rtol=1e-6)
    assert len(np.unique(np.asarray(batch.observation)[:, 2])) > 30
    # the angle goes on by 0.05 s of the new speed; a reset would put it anywhere
    angles = [np.arctan2(x[:, 1], x[:, 0]) for x in (batch.observation, batch.following)]
    moved = angles[1] - angles[0] - 0.05 * np.asarray(batch.following)[:, 2]
    np.testing.assert_allclose(np.sin(moved), np.zeros(40), atol=1e-4)


def test_ddpg_asks_its_targets() -> None:
    algorithm, batch = bound(DDPG), random_batch()
    state = begun(algorithm)
    action = algorithm.policy(state.target["actor"], batch.following)
    value = algorithm.critic.apply(state.target["critics"], batch.following, action)[0, :, 0]
    goal = algorithm.goal(state, batch)
    np.testing.assert_allclose(goal, batch.reward + batch.discount * value, rtol=1e-6)
    assert float(goal[0]) == -1.0
    loss, (errors, metrics) = algorithm.critic_loss(state.params["critics"], batch, goal)
    found = algorithm.critic.apply(state.params["critics"], batch.observation, batch.action)
    np.testing.assert_allclose(errors, np.abs(found[0, :, 0] - goal), rtol=1e-6)
    np.testing.assert_allclose(loss, np.mean(np.square(errors)), rtol=1e-6)
    assert float(metrics["value"]) == pytest.approx(float(found.mean()))


def test_td3_takes_the_lower_critic_and_blurs_the_action() -> None:
    plain, batch = bound(TD3, target_policy_noise=0.0), random_batch()
    noise = jax.random.normal(jax.random.key(5), batch.action.shape)
    state = begun(plain)
    action = plain.policy(state.target["actor"], batch.following)
    values = plain.critic.apply(state.target["critics"], batch.following, action)[..., 0]
    wanted = batch.reward + batch.discount * jnp.minimum(values[0], values[1])
    np.testing.assert_allclose(plain.goal(state, batch, noise), wanted, rtol=1e-6)
    blurred = bound(TD3, target_policy_noise=100.0, target_noise_clip=0.25)
    edges = [
        plain.critic.apply(state.target["critics"], batch.following, action + noise)[..., 0]
        for noise in (-0.25, 0.25)
    ]
    goal = np.asarray(blurred.goal(state, batch, noise))
    either = [batch.reward + batch.discount * edge.min(axis=0) for edge in edges]
    near = np.minimum(*[np.abs(goal - np.asarray(edge)) for edge in either])
    assert near.max() < 1e-5 < np.abs(goal[1:] - np.asarray(wanted)[1:]).min()


def test_td3_computes_the_goals_of_delayed_steps_at_once() -> None:
    algorithm = bound(TD3, target_policy_noise=0.3)
    state, parts = begun(algorithm), batches(random_batch(6), 2)
    own = jax.random.split(jax.random.key(3), (2, gradient_loop.KEYS))
    prepared = algorithm.with_goals(state, parts, own)
    for i in range(2):
        batch = jax.tree.map(lambda x, i=i: x[i], parts)
        noise = jax.random.normal(own[i, 0], batch.action.shape)
        wanted = algorithm.goal(state, batch, noise)
        np.testing.assert_allclose(prepared.goal[i], wanted, rtol=1e-5)
    assert not np.allclose(prepared.goal[0], prepared.goal[1])
    assert jax.tree.all(jax.tree.map(np.array_equal, prepared._replace(goal=()), parts))


def test_td3_moves_the_policy_every_other_step() -> None:
    algorithm = bound(TD3, gradient_steps=1)
    step = jax.jit(lambda state: algorithm.learn(ALONE, state, batches(random_batch()), True)[0])
    first = begun(algorithm)
    second = step(first)
    third = step(second)
    for part in ("actor", "critics"):
        same = np.array_equal(numbers(first.params[part]), numbers(second.params[part]))
        assert same == (part == "actor")
        assert not np.array_equal(numbers(second.params[part]), numbers(third.params[part]))
    assert np.array_equal(numbers(first.target), numbers(second.target))
    assert not np.array_equal(numbers(second.target), numbers(third.target))


@pytest.mark.parametrize(("kind", "every"), [(TD3, 2), (SAC, 3)])
def test_delayed_steps_are_the_same_compiled_together(
    kind: Any, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six gradient steps: each with a loop for what is done at times, and without."""
    algorithm = bound(kind, policy_delay=every, gradient_steps=6)
    state, parts = begun(algorithm), batches(random_batch(18), 6)

    def learn(state: Any) -> Any:
        return algorithm.learn(ALONE, state, parts, True)

    found = []
    for together in (gradient_loop.TOGETHER, 1):
        monkeypatch.setattr(gradient_loop, "TOGETHER", together)
        traced = jax.make_jaxpr(lambda state: learn(state))(state)
        found.append((jax.jit(lambda state: learn(state))(state), str(traced)))
    (together, program), (single, other) = found
    assert program != other
    assert int(together[0].steps) == int(single[0].steps) == 6
    for ours, theirs in zip(together, single, strict=True):
        np.testing.assert_allclose(numbers(ours), numbers(theirs), atol=1e-6)


def test_d4pg_moves_the_distribution() -> None:
    algorithm = bound(D4PG, atoms=41, v_min=-20.0, v_max=20.0)
    state, batch = begun(algorithm), random_batch()
    action = algorithm.policy(state.target["actor"], batch.following)
    logits = algorithm.critic.apply(state.target["critics"], batch.following, action)[0]
    goal = algorithm.goal(state, batch)
    np.testing.assert_allclose(goal.sum(axis=-1), np.ones(3), rtol=1e-5)
    value = expected(logits, algorithm.support)
    mean = (goal * algorithm.support).sum(axis=-1)
    np.testing.assert_allclose(mean, batch.reward + batch.discount * value, atol=1e-4)
    np.testing.assert_allclose(goal[0, 19], 1.0 - 0.0, atol=1e-6)  # ended with -1, the 20th atom
    np.testing.assert_allclose(
        algorithm.values(state.target["critics"], batch.following, action)[0], value, rtol=1e-5
    )


def test_sac_pays_for_entropy() -> None:
    algorithm, batch = bound(SAC, temperature=0.5), random_batch()
    state = begun(algorithm)
    action, log_prob = algorithm.policy(state.params["actor"], batch.following).sample(keys()[0])
    values = algorithm.critic.apply(state.target["critics"], batch.following, action)[..., 0]
    soft = values.min(axis=0) - 0.5 * log_prob
    goal = algorithm.goal(state, batch, keys())
    np.testing.assert_allclose(goal, batch.reward + batch.discount * soft, rtol=1e-5)
    loss, metrics = algorithm.actor_loss(state.params["actor"], state, batch, keys()[4])
    action, log_prob = algorithm.policy(state.params["actor"], batch.observation).sample(keys()[4])
    values = algorithm.critic.apply(state.params["critics"], batch.observation, action)[..., 0]
    np.testing.assert_allclose(loss, (0.5 * log_prob - values.min(axis=0)).mean(), rtol=1e-5)
    assert float(metrics["entropy"]) == pytest.approx(-float(log_prob.mean()), rel=1e-5)


@pytest.mark.parametrize(("wanted", "rises"), [(-50.0, False), (50.0, True)])
def test_the_temperature_follows_the_entropy(wanted: float, rises: bool) -> None:
    algorithm = bound(SAC, entropy_per_action=wanted, learning_rate=0.1, gradient_steps=1)
    state = begun(algorithm)
    after, _, metrics = algorithm.learn(ALONE, state, batches(random_batch()), True)
    moved = float(after.params["log_temperature"] - state.params["log_temperature"])
    assert moved == pytest.approx(0.1 if rises else -0.1, rel=1e-3)  # Adam's first step
    assert float(metrics["temperature"]) == 1.0
    fixed = bound(SAC, learn_temperature=False, gradient_steps=1)
    after, _, _ = fixed.learn(ALONE, begun(fixed), batches(random_batch()), True)
    assert float(after.params["log_temperature"]) == 0.0


def test_a_subset_of_the_critics_makes_the_target() -> None:
    algorithm, batch = bound(SAC, num_critics=5, subset=2), random_batch()
    state = begun(algorithm)
    weights = state.target["critics"]["critic"]["layer_0"]["weight"]
    seen = set()
    for seed in range(12):
        some = random_subset(state.target["critics"], 2, jax.random.key(seed))
        chosen = some["critic"]["layer_0"]["weight"]
        numbers_ = [int(np.argmin(np.abs(weights - one).sum(axis=(1, 2)))) for one in chosen]
        assert len(set(numbers_)) == 2
        seen |= set(numbers_)
    assert seen == set(range(5))
    assert algorithm.goal(state, batch, keys()).shape == (3,)


def test_sac_discrete_sums_over_actions() -> None:
    algorithm, batch = bound(SACDiscrete, CARTPOLE, temperature=0.5), random_batch(env=CARTPOLE)
    state = begun(algorithm)
    probabilities = jax.nn.softmax(algorithm.actor.apply(state.params["actor"], batch.following))
    values = algorithm.critic.apply(state.target["critics"], batch.following).min(axis=0)
    entropy = -(probabilities * jnp.log(probabilities)).sum(axis=-1)
    soft = (probabilities * values).sum(axis=-1) + 0.5 * entropy
    goal = algorithm.goal(state, batch, keys())
    np.testing.assert_allclose(goal, batch.reward + batch.discount * soft, rtol=1e-5)
    _, (errors, _) = algorithm.critic_loss(state.params["critics"], batch, goal, keys()[3])
    found = algorithm.critic.apply(state.params["critics"], batch.observation)
    taken = jnp.stack([found[:, i, a] for i, a in enumerate(batch.action)], axis=1)
    np.testing.assert_allclose(errors, jnp.abs(taken - goal).mean(axis=0), rtol=1e-5)
    assert algorithm.target_entropy == pytest.approx(
        algorithm.entropy_per_action * 0.6931, rel=1e-3
    )


@pytest.mark.parametrize("kind", [DDPG, TD3, D4PG, SAC])
def test_nothing_is_learned_before_there_is_enough(kind: Any) -> None:
    algorithm = bound(kind, gradient_steps=2)
    state, batch = begun(algorithm), random_batch(6)
    learn = jax.jit(lambda enough: algorithm.learn(ALONE, state, batches(batch, 2), enough))
    after, errors, metrics = learn(False)
    assert np.array_equal(numbers(after.params), numbers(state.params))
    assert int(after.steps) == 0
    assert not np.any(errors) and float(metrics["critic_loss"]) == 0.0
    after, errors, metrics = learn(True)
    assert not np.array_equal(numbers(after.params), numbers(state.params))
    assert int(after.steps) == 2
    assert errors.shape == (2, 3) and np.all(np.asarray(errors) > 0.0)
    assert float(metrics["critic_loss"]) > 0.0


def test_several_gradient_steps_are_one_after_another() -> None:
    algorithm = bound(DDPG, gradient_steps=2)
    state, batch = begun(algorithm), random_batch(6)
    together, errors, _ = algorithm.learn(ALONE, state, batches(batch, 2), True)
    halves = [jax.tree.map(lambda x, i=i: x[3 * i : 3 * i + 3], batch) for i in range(2)]
    for i, half in enumerate(halves):
        state, found, _ = algorithm.gradient_step(ALONE, state, half, keys())
        np.testing.assert_allclose(errors[i], found, rtol=1e-5)
    np.testing.assert_allclose(numbers(together.params), numbers(state.params), atol=1e-6)
    np.testing.assert_allclose(numbers(together.target), numbers(state.target), atol=1e-6)


def test_one_gradient_step_for_each_step_of_an_environment() -> None:
    assert bound(SAC, num_envs=1).sampling.steps == 1
    assert bound(SAC, num_envs=4, unroll_length=3).sampling.steps == 12
    assert bound(SAC, num_envs=4, gradient_steps=20).sampling.steps == 20


def test_actions_are_random_until_something_is_learned() -> None:
    """However many updates there were: after a phase on recorded data nothing is random."""
    algorithm = bound(TD3, exploration_noise=0.0)
    state = begun(algorithm)
    assert bool(algorithm.acting(state._replace(updates=jnp.int32(40))).warming)
    acting = algorithm.acting(state._replace(steps=jnp.int32(1)))
    assert not bool(acting.warming)
    timestep: Any = SimpleNamespace(observation=jnp.array([1.0, 0.0, 0.5]))
    actions = {
        float(algorithm.act(params, (), timestep, jax.random.key(seed))[0][0])
        for params in (acting, algorithm.acting(state))
        for seed in range(8)
    }
    greedy = float(algorithm.greedy(acting, (), timestep)[0][0])
    assert greedy in actions and len(actions) == 9
    assert min(actions) < -0.5 < 0.5 < max(actions)


def test_observations_are_normalized_by_what_actors_met() -> None:
    algorithm = SAC(
        **TINY, num_envs=4, unroll_length=5, gradient_steps=1, normalize_observations=True
    )
    with Started(algorithm, "gymnax:Pendulum-v1", dt.strategies.Fused()) as running:
        running.advance(3)
        moments, state = running.state.moments, running.state
    assert float(moments.weight) == 60.0
    _, sample = state.replay.sample((jnp.arange(56)[None] + 0.5) / 56)
    rows = np.asarray(sample.rows.observation)[0, :, 0]
    distinct = np.unique(rows, axis=0)  # all but the 4 rows that still wait for what follows them
    assert len(distinct) == 56
    np.testing.assert_allclose(moments.mean, distinct.mean(axis=0), atol=0.3)
    sampling = bound(SAC, normalize_observations=True).sampling
    shown = sampling.normalized(moments, jnp.asarray(moments.mean))
    np.testing.assert_allclose(shown, np.zeros(3), atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        (SAC, {"buffer_size": 0}, "--buffer-size is 0: give 1 or more"),
        (SAC, {"gradient_steps": -1}, "--gradient-steps is -1: give 0 or more"),
        (SAC, {"subset": 3}, "--subset is 3: give 1 to 2"),
        (SAC, {"dropout": 1.0}, "--dropout is 1.0: give 0 or more, less than 1"),
        (SAC, {"temperature": 0.0}, "--temperature is 0.0: give more than 0"),
        (
            SAC,
            {"learning_starts": 100, "buffer_size": 50},
            "--learning-starts is 100: give 1 to 50",
        ),
        (SACDiscrete, {"entropy_per_action": -1.0}, "--entropy-per-action is -1.0: give 0 to 1"),
        (TD3, {"policy_delay": 0}, "--policy-delay is 0: give 1 or more"),
        (TD3, {"target_policy_noise": -0.1}, "--target-policy-noise is -0.1: give 0 or more"),
        (DDPG, {"exploration_noise": -0.1}, "--exploration-noise is -0.1: give 0 or more"),
        (D4PG, {"atoms": 1}, "--atoms is 1: give 2 or more"),
        (D4PG, {"v_min": 5.0, "v_max": 5.0}, "more than --v-min, which is 5.0"),
    ],
)
def test_wrong_options(kind: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        kind(**options)


@pytest.mark.parametrize("kind", [DDPG, D4PG, TD3, SAC])
def test_discrete_actions_are_refused(kind: Any) -> None:
    sentence = f"{kind.__name__} acts in Continuous action spaces, but gymnasium:CartPole-v1 has"
    with pytest.raises(UserError, match=sentence):
        dt.explain(kind(), "gymnasium:CartPole-v1", "local")


def test_continuous_actions_are_refused() -> None:
    sentence = "SACDiscrete acts in Discrete action spaces, but gymnasium:Pendulum-v1 has"
    with pytest.raises(UserError, match=sentence):
        dt.explain(SACDiscrete(), "gymnasium:Pendulum-v1", "local")


def test_actions_without_bounds_are_refused() -> None:
    spec = EnvSpec("toy:Free", PENDULUM.observation, Continuous(2, bounded=False))
    sentence = "SAC explores within the bounds of actions, but toy:Free takes .* choose ppo"
    with pytest.raises(UserError, match=sentence):
        SAC().bind(dt.Task(spec, 1, 100))


@pytest.mark.parametrize("updates", [1, 4])
def test_a_gradient_step_is_traced_once_for_each_place_within_the_delay(
    monkeypatch: pytest.MonkeyPatch, updates: int
) -> None:
    traced: list[str] = []

    def noted(name: str, function: Any) -> Any:
        return lambda *arguments: traced.append(name) or function(*arguments)

    monkeypatch.setattr(TD3, "gradient_step", noted("step", TD3.gradient_step))
    monkeypatch.setattr(TD3, "actor_loss", noted("policy", TD3.actor_loss))
    dt.trace(TD3(**TINY, gradient_steps=updates), "gymnax:Pendulum-v1")
    places = 2 if updates % 2 == 0 else 1  # of every two, one without the policy and one with it
    assert (traced.count("step"), traced.count("policy")) == (places, places)
