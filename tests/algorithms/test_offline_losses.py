"""BC, TD3+BC, CQL, IQL and AWAC: what they are told by a batch, and what they refuse."""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import numbers

import dovetail as dt
from dovetail.algorithm import Algorithm
from dovetail.algorithms import AWAC, BC, CQL, IQL, TD3BC, DiscreteCQL
from dovetail.blocks.gradient_loop import KEYS
from dovetail.blocks.replayed import Batch
from dovetail.envs.interface import Continuous, EnvSpec
from dovetail.errors import UserError
from dovetail.functions.distributions import Gaussian

PENDULUM = dt.envs.resolve("gymnax:Pendulum-v1").spec
CARTPOLE = dt.envs.resolve("dovetail:CartPole-v1").spec
ALONE: Any = SimpleNamespace(mean=lambda tree: tree, own_keys=lambda keys, items: keys)
BOTH = [PENDULUM, CARTPOLE]
COUNT = 5


def bound(kind: Any, env: EnvSpec = PENDULUM, **options: Any) -> Any:
    tiny: dict[str, Any] = {
        "hidden_sizes": (4,),
        "buffer_size": 64,
        "learning_starts": 1,
        "gradient_steps": 1,
    }
    return kind(**tiny | options).bind(dt.Task(env, num_envs=1, steps=1000))


def recorded(env: EnvSpec = PENDULUM) -> Batch:
    draw = np.random.default_rng(0).normal
    shape = (COUNT, *env.observation.shape)
    continuous = isinstance(env.action, Continuous)
    return Batch(
        observation=jnp.asarray(draw(size=shape), jnp.float32),
        action=jnp.linspace(-0.8, 0.8, COUNT)[:, None] if continuous else jnp.arange(COUNT) % 2,
        reward=jnp.linspace(-1.0, 1.0, COUNT),
        discount=jnp.full(COUNT, 0.9).at[0].set(0.0),
        following=jnp.asarray(draw(size=shape), jnp.float32),
        weights=jnp.ones(COUNT).at[4].set(0.0),  # the last one was broken off
    )


def begun(algorithm: Algorithm) -> Any:
    """A first state whose target networks differ from the networks."""
    state = jax.jit(algorithm.init)(jax.random.key(0))
    other = jax.jit(algorithm.init)(jax.random.key(1))
    return state._replace(target=other.target)


def keys() -> jax.Array:
    return jax.random.split(jax.random.key(5), KEYS)


def alone(x: jax.Array) -> jax.Array:
    """The mean over one learner."""
    return x


def assert_slope(loss: Any, params: Any) -> None:
    """The loss rises along its gradient by as much as that says."""
    gradient = jax.grad(loss)(params)
    squared = sum(float(jnp.sum(jnp.square(g))) for g in jax.tree.leaves(gradient))
    assert squared > 1e-6
    size = 1e-2 / math.sqrt(squared)
    up, down = (
        float(loss(jax.tree.map(lambda p, g, s=sign: p + s * size * g, params, gradient)))
        for sign in (1, -1)
    )
    assert (up - down) / (2 * size) == pytest.approx(squared, rel=0.02)


def test_cloning_makes_the_recorded_likelier() -> None:
    algorithm, batch = bound(BC), recorded()
    params = begun(algorithm).params["actor"] | {"log_std": jnp.array([math.log(0.5)])}
    mean = np.tanh(np.asarray(algorithm.actor.apply(params, batch.observation)))
    found, metrics = algorithm.actor_loss(params, batch)
    squares = np.square((np.asarray(batch.action) - mean) / 0.5)[:4]
    wanted = 0.5 * squares.sum() / 5 + 0.8 * (math.log(0.5) + 0.5 * math.log(2 * math.pi))
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)
    assert float(metrics["actor_loss"]) == float(found)
    assert_slope(lambda p: algorithm.actor_loss(p, batch)[0], params)


def test_cloning_among_discrete_actions_is_cross_entropy() -> None:
    algorithm, batch = bound(BC, CARTPOLE), recorded(CARTPOLE)
    params = begun(algorithm).params["actor"]
    logits = np.asarray(algorithm.actor.apply(params, batch.observation), np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    wanted = -np.log(probabilities[np.arange(4), [0, 1, 0, 1]]).sum() / 5
    assert float(algorithm.actor_loss(params, batch)[0]) == pytest.approx(wanted, rel=1e-5)


def test_td3_bc_weighs_value_against_distance() -> None:
    algorithm, batch = bound(TD3BC, alpha=2.5), recorded()
    state = begun(algorithm)
    params, critics = state.params["actor"], state.params["critics"]
    action = algorithm.policy(params, batch.observation)
    values = np.asarray(algorithm.critic.apply(critics, batch.observation, action))[0, :, 0]
    distance = np.square(np.asarray(action - batch.action))[:4].sum() / 5
    found, metrics = algorithm.actor_loss(params, critics, batch, alone)
    wanted = distance - 2.5 * values.mean() / np.abs(values).mean()
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)
    assert float(metrics["imitation_loss"]) == pytest.approx(float(distance), rel=1e-5)
    cloning = bound(TD3BC, alpha=0.0)
    assert float(cloning.actor_loss(params, critics, batch, alone)[0]) == pytest.approx(
        float(distance)
    )
    # ten times the value weigh as much as before
    larger = jax.tree.map(lambda x: x, critics)
    last = larger["critic"]["layer_1"]
    larger["critic"]["layer_1"] = jax.tree.map(lambda x: 10 * x, last)
    again, _ = algorithm.actor_loss(params, larger, batch, alone)
    assert float(again) == pytest.approx(float(found), rel=1e-5)


def test_cql_draws_other_actions_by_known_densities() -> None:
    algorithm, batch = bound(CQL, samples=2), recorded()
    state = begun(algorithm)
    goal = algorithm.goal(state, batch, keys())
    assert goal.others.shape == (COUNT, 6, 1) and goal.log_densities.shape == (COUNT, 6)
    assert float(jnp.abs(goal.others).max()) <= 1.0
    np.testing.assert_allclose(goal.log_densities[:, :2], math.log(0.5 * 6), rtol=1e-6)
    x = np.arctanh(np.asarray(goal.others, np.float64))
    for part, seen in ((slice(2, 4), batch.observation), (slice(4, 6), batch.following)):
        policy = algorithm.policy(state.params["actor"], seen)
        drawn = Gaussian(policy.mean[:, None], policy.log_std[:, None])
        normal = np.asarray(drawn.log_prob(jnp.asarray(x[:, part])))
        wanted = normal - np.log(1 - np.square(np.tanh(x[:, part])))[..., 0] + math.log(6)
        np.testing.assert_allclose(goal.log_densities[:, part], wanted, atol=1e-3)
    assert float(goal.values[0]) == -1.0  # it ended there


def test_cql_presses_other_actions_down() -> None:
    plain, batch = bound(CQL, samples=2, cql_alpha=0.0), recorded()
    state = begun(plain)
    goal, params = plain.goal(state, batch, keys()), state.params["critics"]
    values = np.asarray(plain.critic.apply(params, batch.observation, batch.action))[..., 0]
    errors = values - np.asarray(goal.values)
    wanted = np.square(errors)[:, :4].sum() / 5
    loss, (found, metrics) = plain.critic_loss(params, batch, goal, keys()[3])
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    np.testing.assert_allclose(found, np.abs(errors).mean(axis=0), rtol=1e-5)
    others = np.stack(
        [
            np.asarray(plain.critic.apply(params, batch.observation, action))[..., 0]
            for action in goal.others.swapaxes(0, 1)
        ]
    )
    soft = np.log(np.exp(others - np.asarray(goal.log_densities).T[:, None]).sum(axis=0))
    gap = soft - values
    assert float(metrics["conservative_gap"]) == pytest.approx(float(gap.mean()), rel=1e-4)
    pressed = bound(CQL, samples=2, cql_alpha=3.0)
    loss, _ = pressed.critic_loss(params, batch, goal, keys()[3])
    assert float(loss) == pytest.approx(float(wanted + 3 * gap[:, :4].sum() / 5), rel=1e-5)
    assert_slope(lambda p: pressed.critic_loss(p, batch, goal, keys()[3])[0], params)


def test_discrete_cql_is_double_q_learning_with_a_penalty() -> None:
    algorithm, batch = bound(DiscreteCQL, CARTPOLE, cql_alpha=2.0), recorded(CARTPOLE)
    state = begun(algorithm)
    chooses = np.asarray(algorithm.values(state.params["critics"], batch.following))
    judges = np.asarray(algorithm.values(state.target["critics"], batch.following))
    best = judges[np.arange(COUNT), chooses.argmax(axis=1)]
    goal = algorithm.goal(state, batch)
    np.testing.assert_allclose(goal, batch.reward + batch.discount * best, rtol=1e-6)
    loss, (errors, metrics) = algorithm.critic_loss(state.params["critics"], batch, goal)
    values = np.asarray(algorithm.values(state.params["critics"], batch.observation))
    taken = values[np.arange(COUNT), np.asarray(batch.action)]
    gap = np.log(np.exp(values).sum(axis=1)) - taken
    np.testing.assert_allclose(errors, np.abs(taken - goal), rtol=1e-5)
    wanted = (np.square(taken - goal) + 2.0 * gap)[:4].sum() / 5
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    assert float(metrics["conservative_gap"]) == pytest.approx(float(gap.mean()), rel=1e-5)
    assert float(metrics["value"]) == pytest.approx(float(taken.mean()), rel=1e-5)


@pytest.mark.parametrize("env", BOTH, ids=["continuous", "discrete"])
def test_iql_never_asks_for_an_action_that_was_not_recorded(env: EnvSpec) -> None:
    algorithm, batch = bound(IQL, env, expectile=0.8, inverse_temperature=2.0), recorded(env)
    state = begun(algorithm)
    after, errors, metrics = algorithm.gradient_step(ALONE, state, batch, keys())
    values = np.asarray(algorithm.values(state.params["critics"], batch.observation, batch.action))
    worth = np.asarray(algorithm.values(state.target["critics"], batch.observation, batch.action))
    value = np.asarray(algorithm.value(state.params["value"], batch.observation))
    following = np.asarray(algorithm.value(state.params["value"], batch.following))
    goal = np.asarray(batch.reward + batch.discount * following)
    np.testing.assert_allclose(errors, np.abs(values - goal).mean(axis=0), rtol=1e-5)
    advantages = worth.min(axis=0) - value
    lost = np.where(advantages < 0, 0.2, 0.8) * np.square(advantages)
    assert float(metrics["expectile_loss"]) == pytest.approx(float(lost[:4].sum() / 5), rel=1e-5)
    weights = np.minimum(np.exp(2.0 * advantages), 100.0)
    assert float(metrics["mean_weight"]) == pytest.approx(float(weights.mean()), rel=1e-5)
    policy = algorithm.policy(state.params["actor"], batch.observation)
    likely = np.asarray(policy.log_prob(batch.action))
    assert float(metrics["actor_loss"]) == pytest.approx(
        float(-(weights * likely)[:4].sum() / 5), rel=1e-5
    )
    loss = np.square(values - goal).sum(axis=0)[:4].sum() / 5
    assert float(metrics["critic_loss"]) == pytest.approx(float(loss), rel=1e-5)
    for part in ("actor", "critics", "value"):
        assert not np.array_equal(numbers(after.params[part]), numbers(state.params[part]))
    assert set(after.target) == {"critics"}
    assert_slope(
        lambda p: algorithm.value_loss(p, batch, worth.min(axis=0))[0], state.params["value"]
    )


def test_awac_compares_with_its_own_actions() -> None:
    algorithm, batch = bound(AWAC, inverse_temperature=0.5), recorded()
    state = begun(algorithm)
    policy = algorithm.policy(state.params["actor"], batch.following)
    action = jnp.clip(policy.sample(keys()[0]), -1.0, 1.0)
    following = algorithm.values(state.target["critics"], batch.following, action).min(axis=0)
    goal = algorithm.goal(state, batch, keys()[0])
    np.testing.assert_allclose(goal, batch.reward + batch.discount * following, rtol=1e-5)
    params, critics = state.params["actor"], state.params["critics"]
    policy = algorithm.policy(params, batch.observation)
    own = jnp.clip(policy.sample(keys()[1]), -1.0, 1.0)
    usual = algorithm.values(critics, batch.observation, own).min(axis=0)
    taken = algorithm.values(critics, batch.observation, batch.action).min(axis=0)
    weights = jnp.exp(0.5 * (taken - usual))
    wanted = -(weights * policy.log_prob(batch.action))[:4].sum() / 5
    loss, metrics = algorithm.actor_loss(params, critics, batch, keys()[1])
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    assert float(metrics["mean_weight"]) == pytest.approx(float(weights.mean()), rel=1e-5)

    def fitted(p: Any) -> jax.Array:
        """The loss with weights that are given."""
        likely = algorithm.policy(p, batch.observation).log_prob(batch.action)
        return -(weights * likely)[:4].sum() / 5

    gradient = jax.grad(lambda p: algorithm.actor_loss(p, critics, batch, keys()[1])[0])(params)
    fixed = jax.grad(fitted)(params)
    np.testing.assert_allclose(numbers(gradient), numbers(fixed), atol=1e-5)


def test_awac_expects_over_discrete_actions() -> None:
    algorithm, batch = bound(AWAC, CARTPOLE), recorded(CARTPOLE)
    state = begun(algorithm)
    logits = algorithm.actor.apply(state.params["actor"], batch.following)
    values = algorithm.critic.apply(state.target["critics"], batch.following).min(axis=0)
    expected = (jax.nn.softmax(logits) * values).sum(axis=-1)
    goal = algorithm.goal(state, batch, keys()[0])
    np.testing.assert_allclose(goal, batch.reward + batch.discount * expected, rtol=1e-5)


@pytest.mark.parametrize("env", BOTH, ids=["continuous", "discrete"])
@pytest.mark.parametrize("kind", [BC, IQL, AWAC])
def test_a_cloned_policy_acts(kind: Any, env: EnvSpec) -> None:
    algorithm = bound(kind, env)
    acting = algorithm.acting(begun(algorithm))._replace(warming=jnp.bool_(False))
    timestep: Any = SimpleNamespace(observation=jnp.ones(env.observation.shape))
    drawn = [algorithm.act(acting, (), timestep, jax.random.key(i))[0] for i in range(20)]
    best, _ = algorithm.greedy(acting, (), timestep)
    if isinstance(env.action, Continuous):
        wide = acting._replace(network=acting.network | {"log_std": jnp.array([9.0])})
        drawn += [algorithm.act(wide, (), timestep, jax.random.key(i))[0] for i in range(20)]
        assert {float(jnp.abs(x)[0]) for x in drawn} >= {1.0}
        assert all(-1.0 <= float(x[0]) <= 1.0 for x in [*drawn, best])
        assert best.shape == (1,)
    else:
        assert {int(x) for x in drawn} == {0, 1}
        assert int(best) == int(algorithm.policy(acting.network, timestep.observation).mode())


def test_discrete_cql_acts_by_its_values() -> None:
    algorithm = bound(DiscreteCQL, CARTPOLE, epsilon=0.5)
    state = begun(algorithm)
    acting = algorithm.acting(state)._replace(warming=jnp.bool_(False))
    timestep: Any = SimpleNamespace(observation=jnp.array([0.1, -0.2, 0.3, 0.4]))
    best = int(algorithm.greedy(acting, (), timestep)[0])
    values = algorithm.values(state.params["critics"], timestep.observation[None])[0]
    assert best == int(np.argmax(values))
    act = jax.jit(jax.vmap(lambda key: algorithm.act(acting, (), timestep, key)[0]))
    share = float((act(jax.random.split(jax.random.key(0), 2000)) == best).mean())
    assert share == pytest.approx(0.75, abs=0.04)


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        (IQL, {"expectile": 1.0}, "--expectile is 1.0: give more than 0, less than 1"),
        (IQL, {"inverse_temperature": -1.0}, "--inverse-temperature is -1.0: give 0 or more"),
        (AWAC, {"weight_limit": 0.0}, "--weight-limit is 0.0: give more than 0"),
        (AWAC, {"num_critics": 0}, "--num-critics is 0: give 1 or more"),
        (CQL, {"cql_alpha": -1.0}, "--cql-alpha is -1.0: give 0 or more"),
        (CQL, {"samples": 0}, "--samples is 0: give 1 or more"),
        (DiscreteCQL, {"epsilon": 2.0}, "--epsilon is 2.0: give 0 to 1"),
        (DiscreteCQL, {"cql_alpha": -1.0}, "--cql-alpha is -1.0: give 0 or more"),
        (TD3BC, {"alpha": -1.0}, "--alpha is -1.0: give 0 or more"),
    ],
)
def test_options_that_are_wrong(kind: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        kind(**options)
