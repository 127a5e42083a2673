"""The algorithms of asynchronous actors: what they compute from trajectories on time, and late."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import LENGTH, a2c, interpreted, numbers, ppo
from toys import drift_actor, drift_step, drift_task

from dovetail.algorithm import Correction, Trajectory
from dovetail.algorithms.a2c import A2C
from dovetail.algorithms.a3c import A3C
from dovetail.algorithms.appo import APPO
from dovetail.algorithms.impala import IMPALA
from dovetail.algorithms.ppo import PPO
from dovetail.algorithms.reinforce import REINFORCE
from dovetail.blocks.optimizers import apply_gradients
from dovetail.errors import UserError
from dovetail.functions.normalization import Moments, normalize
from dovetail.functions.returns import Clips, VTrace, vtrace
from dovetail.graph.interpret import Interpreting

ENVS = 4
RECURRENT: dict[str, Any] = {"recurrent": 4, "normalize_observations": True}
EVERYTHING: dict[str, Any] = {**RECURRENT, "normalize_rewards": True}


def impala(**options: Any) -> IMPALA:
    return dataclasses.replace(IMPALA(LENGTH, hidden_sizes=(8,), max_grad_norm=9.0), **options)


def appo(**options: Any) -> APPO:
    return dataclasses.replace(
        APPO(LENGTH, hidden_sizes=(8,), epochs=2, num_minibatches=2), **options
    )


def a3c(**options: Any) -> A3C:
    return dataclasses.replace(A3C(LENGTH, hidden_sizes=(8,)), **options)


def bound(algorithm: Any) -> Any:
    return algorithm.bind(drift_task(ENVS))


def after_updates(algorithm: Any) -> Any:
    """The state after two synchronous updates; episodes end in both ways."""
    algorithm = bound(dataclasses.replace(algorithm, learning_rate=1e-3, anneal_lr=False))
    start = algorithm.init(jax.random.key(3)), drift_actor(algorithm, ENVS)
    return interpreted(algorithm, drift_step, *start, 2)[0]


def unrolled(algorithm: Any, params: Any) -> Trajectory:
    """The first unroll, of a bound algorithm that acts with `params`, in which all can be seen."""
    rl = Interpreting(algorithm, drift_step, drift_actor(algorithm, ENVS))
    for _ in range(20):
        batch = rl.unroll(algorithm.act, params, LENGTH, bootstrap=algorithm.value)
        ended = batch.terminated | batch.truncated
        going_on = batch.first.any() and not batch.first[0].all() and not ended[-1].all()
        if batch.terminated[:-1].any() and batch.truncated[:-1].any() and going_on:
            return batch
    raise AssertionError("no unroll had episodes that end in both ways")


def learner(algorithm: Any, seed: int = 0) -> Any:
    """A state that has seen some observations already."""
    state = algorithm.init(jax.random.key(seed))
    moments = Moments(jnp.float32(50), jnp.array([0.1, 0.2, 0.3, 0.4]), jnp.full(4, 0.5))
    return state._replace(moments=moments)


def late(algorithm: Any) -> tuple[Any, Trajectory]:
    """A learner, and a batch that quite other weights and moments have made."""
    other = algorithm.init(jax.random.key(1))
    params = jax.tree.map(lambda x: jax.random.normal(jax.random.key(2), x.shape), other.params)
    return learner(algorithm), unrolled(algorithm, algorithm.acting(other._replace(params=params)))


class Alone:
    """The `rl` of one learner."""

    def mean(self, tree: Any) -> Any:
        return tree


def assert_close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(numbers(found), numbers(expected), tolerance, tolerance)


# On time.


@pytest.mark.parametrize(
    ("asynchronous", "synchronous"),
    [
        (impala(), a2c(gae_lambda=1.0, max_grad_norm=9.0)),
        (
            impala(vtrace_lambda=0.9, **EVERYTHING),
            a2c(gae_lambda=0.9, max_grad_norm=9.0, **EVERYTHING),
        ),
        (appo(), ppo()),
        (appo(**EVERYTHING), ppo(**EVERYTHING)),
        (a3c(), a2c()),
        (a3c(**RECURRENT), a2c(**RECURRENT)),
    ],
    ids=["impala", "impala-recurrent", "appo", "appo-recurrent", "a3c", "a3c-recurrent"],
)
def test_on_its_own_trajectories_it_is_the_synchronous_algorithm(
    asynchronous: Any, synchronous: Any
) -> None:
    expected = after_updates(synchronous)
    assert_close(after_updates(asynchronous), expected)
    start = bound(synchronous).init(jax.random.key(3))
    assert np.abs(numbers(expected.params) - numbers(start.params)).max() > 1e-3


def test_what_each_corrects_for() -> None:
    assert A2C.correction == REINFORCE.correction == Correction("nothing", 0)
    assert PPO.correction == Correction("the clipped ratio", 1)
    assert IMPALA.correction == APPO.correction == Correction("V-trace", None)
    assert A3C.correction == Correction("nothing, but tolerates stale gradients", None)


def test_the_page_tells_the_defaults() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"
    table = page.read_text(encoding="utf-8").partition("| default of |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", table, flags=re.MULTILINE)
    assert [row[0] for row in rows] == ["unroll_length", "vtrace_lambda", "gae_lambda"]
    for option, *written in rows:
        defaults = [getattr(algorithm(), option, "–") for algorithm in (IMPALA, APPO, A3C)]
        assert written == [str(default) for default in defaults], option


@pytest.mark.parametrize(
    ("algorithm", "options", "sentence"),
    [
        (IMPALA, {"vtrace_lambda": 1.5}, "--vtrace-lambda is 1.5: give 0 to 1."),
        (IMPALA, {"rho_clip": 0.0}, "--rho-clip is 0.0: give more than 0."),
        (IMPALA, {"gradient_clip": -1.0}, "--gradient-clip is -1.0: give more than 0."),
        (APPO, {"c_clip": 0.0}, "--c-clip is 0.0: give more than 0."),
        (A3C, {"gae_lambda": -0.1}, "--gae-lambda is -0.1: give 0 to 1."),
    ],
)
def test_options_that_cannot_be(algorithm: Any, options: dict[str, float], sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        algorithm(**options)
    assert str(raised.value) == sentence


# Late: V-trace.


def by_rows(algorithm: Any, params: Any, moments: Moments, batch: Trajectory) -> Any:
    """(log-probabilities, entropies [T, B], values [T + 1, B]), by single steps of the network."""
    start = algorithm.actor_critic.initial_carry()
    memory = jax.tree.map(lambda x: x[0], batch.carry.memory)
    rows = []
    for t in range(LENGTH + 1):
        observation = batch.observation[t] if t < LENGTH else batch.last.observation[0]
        first = batch.first[t] if t < LENGTH else batch.last.first[0]
        memory = jnp.where(first[:, None], start, memory) if algorithm.recurrent else memory
        if algorithm.normalize_observations:
            observation = normalize(moments, observation)
        distribution, value, memory = algorithm.actor_critic.step(params, memory, observation)
        action = batch.action[min(t, LENGTH - 1)]
        rows.append((distribution.log_prob(action), distribution.entropy(), value))
    log_probs, entropies, values = (jnp.stack(column) for column in zip(*rows, strict=True))
    return log_probs[:-1], entropies[:-1], values


def traced(algorithm: Any, log_probs: jax.Array, values: jax.Array, batch: Trajectory) -> VTrace:
    next_values = jnp.stack(
        [jnp.where(batch.truncated[t], batch.bootstrap[t], values[t + 1]) for t in range(LENGTH)]
    )
    return vtrace(
        log_probs - batch.extras.log_prob,
        batch.reward,
        values[:-1],
        next_values,
        batch.terminated,
        batch.truncated,
        algorithm.gamma,
        algorithm.vtrace_lambda,
        Clips(algorithm.rho_clip, algorithm.c_clip),
    )


@pytest.mark.parametrize("options", [{}, RECURRENT], ids=["plain", "recurrent"])
def test_impala_learns_by_its_own_weights_from_what_others_did(options: dict[str, Any]) -> None:
    algorithm = bound(impala(rho_clip=1.2, c_clip=0.9, vtrace_lambda=0.8, **options))
    state, batch = late(algorithm)
    log_probs, _, values = by_rows(algorithm, state.params, state.moments, batch)
    trace = traced(algorithm, log_probs, values, batch)
    ratios = jnp.minimum(jnp.exp(log_probs - batch.extras.log_prob), 1.0)
    assert ratios.min() < 0.9

    def loss(params: Any) -> jax.Array:
        log_probs, entropies, values = by_rows(algorithm, params, state.moments, batch)
        errors = values[:-1] - trace.targets
        terms = -log_probs * ratios * trace.advantages + 0.25 * errors**2 - 0.01 * entropies
        return terms.mean()

    gradients = jax.grad(loss)(state.params)
    expected = apply_gradients(algorithm.optimizer(), gradients, state.optimizer, state.params)
    found, metrics = algorithm.learn(Alone(), state, batch)
    assert_close((found.params, found.optimizer), expected)
    np.testing.assert_allclose(metrics["loss"], loss(state.params), rtol=1e-5)
    np.testing.assert_allclose(metrics["mean_ratio"], ratios.mean(), rtol=1e-5)


@pytest.mark.parametrize("options", [{}, RECURRENT], ids=["plain", "recurrent"])
def test_appo_estimates_are_not_weighed_twice(options: dict[str, Any]) -> None:
    algorithm = bound(appo(rho_clip=1.2, c_clip=0.9, **options))
    state, batch = late(algorithm)
    found = algorithm.estimates(state, batch, batch.reward)
    log_probs, _, values = by_rows(algorithm, state.params, state.moments, batch)
    trace = traced(algorithm, log_probs, values, batch)
    np.testing.assert_allclose(found.advantages, trace.advantages, atol=1e-5)
    np.testing.assert_allclose(found.targets, trace.targets, atol=1e-5)


@pytest.mark.parametrize("make", [impala, appo])
def test_only_a_truncated_episode_is_valued_by_the_actor(make: Any) -> None:
    algorithm = bound(make())
    state, batch = late(algorithm)

    @jax.jit
    def value_loss_with(bootstrap: jax.Array) -> Any:
        _, metrics = algorithm.learn(Alone(), state, batch._replace(bootstrap=bootstrap))
        return metrics["value_loss"]

    expected = value_loss_with(batch.bootstrap)
    others = jnp.where(batch.truncated, batch.bootstrap, 1e3)
    assert value_loss_with(others) == expected
    assert abs(value_loss_with(batch.bootstrap + 1.0) - expected) > 1e-2


# Gradients of several actors.


def test_however_many_actors_the_gradient_is_the_whole_batchs() -> None:
    algorithm = bound(a3c(**EVERYTHING))
    state, batch = late(algorithm)
    batch = batch._replace(valid=batch.valid.at[1:, 0].set(False))  # of the first actor's steps
    acting = algorithm.acting(state)

    def part(first: int, last: int) -> Any:
        own = jax.tree.map(lambda x: x[:, first:last], batch)
        return algorithm.contribute(acting, state.return_moments, own)

    halves = jax.tree.map(lambda a, b: (a + b) / 2, part(0, 2), part(2, 4))
    np.testing.assert_allclose(halves.share, 13 / 16)
    found, metrics = algorithm.apply(state, halves)
    whole, whole_metrics = algorithm.apply(state, part(0, 4))
    assert_close((found, metrics), (whole, whole_metrics))
    synchronous = bound(a2c(**RECURRENT))
    expected, expected_metrics = synchronous.learn(Alone(), state, batch)
    assert_close(whole[:3], expected[:3])  # parameters, optimizer, moments of observations
    assert_close(metrics, {name: expected_metrics[name] for name in metrics})


def test_nothing_valid_changes_nothing_but_the_count() -> None:
    algorithm = bound(a3c(normalize_observations=True))
    state, batch = late(algorithm)
    batch = batch._replace(valid=jnp.zeros_like(batch.valid))
    parts = algorithm.contribute(algorithm.acting(state), state.return_moments, batch)
    after, _ = algorithm.apply(state, parts)
    assert_close((after.params, after.moments), (state.params, state.moments), 1e-6)
    assert after.updates == 1


def test_moments_are_those_of_all_that_was_seen_however_late() -> None:
    algorithm = bound(a3c(**EVERYTHING))
    state = algorithm.init(jax.random.key(0))
    old = algorithm.acting(state)  # moments of nothing, which both unrolls are normalized by
    batch = unrolled(algorithm, old)
    seen, returns = [], []
    for shift in (0.0, 5.0):
        batch = batch._replace(observation=batch.observation + shift, reward=batch.reward + shift)
        parts = algorithm.contribute(old, state.return_moments, batch)
        state, _ = algorithm.apply(state, parts)
        seen.append(np.reshape(batch.observation, (-1, 4)))
        returns.append(np.ravel(0.99 * batch.extras.discounted_return + batch.reward))
    everything = np.concatenate(seen)
    np.testing.assert_allclose(state.moments.mean, everything.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(state.moments.variance, everything.var(axis=0), rtol=1e-4)
    np.testing.assert_allclose(state.return_moments.mean, np.mean(returns), rtol=1e-5)
    np.testing.assert_allclose(state.return_moments.variance, np.var(returns), rtol=1e-4)


def test_rewards_are_scaled_by_what_the_actor_was_sent() -> None:
    algorithm = bound(a3c(normalize_rewards=True))
    state, batch = late(algorithm)
    moments = Moments(jnp.float32(1), jnp.float32(0), jnp.float32(4))  # a deviation of 2
    found = algorithm.contribute(algorithm.acting(state), moments, batch)
    halved = batch._replace(reward=batch.reward / 2)
    expected = bound(a3c()).contribute(algorithm.acting(state), moments, halved)
    assert_close(found.gradients, expected.gradients)
