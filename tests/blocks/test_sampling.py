from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.algorithm import Task
from dovetail.algorithms import SAC
from dovetail.blocks.replayed import Row, joined, transitions, update_priorities
from dovetail.envs.interface import Continuous, EnvSpec
from dovetail.functions.normalization import initial_moments
from dovetail.replay.data import DataSpec
from dovetail.replay.sample import ItemKeys, Sample

ENV = EnvSpec("toy:Line", jax.ShapeDtypeStruct((1,), jnp.float32), Continuous(1, bounded=True))
ALONE: Any = SimpleNamespace(
    mean=lambda tree: tree, max=lambda tree: tree, gather=lambda tree: tree
)
DATA = DataSpec(steps=10, held=10, rows=12)


def bound(online: bool = True, data: DataSpec | None = None, **options: Any) -> Any:
    return SAC(**options).bind(Task(ENV, 4, 100, data=data, online=online))


def sample(probabilities: list[float]) -> Sample:
    """Two windows of two steps and a row behind them; the second terminated after its first."""
    rows = Row(
        observation=jnp.array([[[1.0], [2.0], [3.0]], [[4.0], [5.0], [6.0]]]),
        action=jnp.array([[[0.1], [0.2], [0.3]], [[0.4], [0.5], [0.6]]]),
        reward=jnp.array([[1.0, 10.0, 99.0], [3.0, 99.0, 99.0]]),
        terminated=jnp.array([[False, False, False], [True, False, False]]),
    )
    mask = jnp.array([[True, True, False], [True, False, False]])
    slot = jnp.arange(2)
    chances, size = jnp.array(probabilities), jnp.full(2, 10)
    return Sample(rows, mask, ItemKeys(slot, slot), chances, size, slot)


def test_transitions_sum_rewards_and_look_behind_the_last_step():
    batch = transitions(sample([0.1, 0.1]), 0.5)
    np.testing.assert_allclose(batch.reward, [6.0, 3.0])
    np.testing.assert_allclose(batch.discount, [0.25, 0.0])
    np.testing.assert_allclose(batch.observation[:, 0], [1.0, 4.0])
    np.testing.assert_allclose(batch.following[:, 0], [3.0, 5.0])
    np.testing.assert_allclose(batch.action[:, 0], [0.1, 0.4])
    np.testing.assert_allclose(batch.weights, [1.0, 1.0])


def test_priorities_weigh_and_moments_normalize():
    algorithm = bound(prioritized=True, importance_exponent=1.0, normalize_observations=True)
    moments = initial_moments(ENV.observation)._replace(
        mean=jnp.array([2.0]), variance=jnp.array([4.0])
    )
    batch = algorithm.sampling.batch(ALONE, moments, sample([0.1, 0.4]))
    np.testing.assert_allclose(batch.weights, [1.0, 0.25])
    np.testing.assert_allclose(batch.observation[:, 0], [-0.5, 1.0])
    np.testing.assert_allclose(batch.following[:, 0], [0.5, 1.5])


@pytest.mark.parametrize(
    ("online", "data", "share", "recorded"),
    [(True, None, 0.5, 0), (False, DATA, 0.5, 8), (True, DATA, 0.25, 2), (True, DATA, 0.01, 1)],
)
def test_a_batch_is_shared_between_replay_and_data(online, data, share, recorded):
    sampling = bound(online, data, batch_size=8, data_share=share).sampling
    assert sampling.recorded == recorded


def test_draws_differ_by_update():
    algorithm = bound(data=DATA, batch_size=8, gradient_steps=3)
    state: Any = SimpleNamespace(key=jax.random.key(0), updates=jnp.int32(0))
    later: Any = SimpleNamespace(key=jax.random.key(0), updates=jnp.int32(1))
    for draws in (algorithm.sampling.draws, algorithm.sampling.recorded_draws):
        assert draws(state).shape == (3, 4)
        assert not np.any(np.asarray(draws(state)) == np.asarray(draws(later)))
    assert algorithm.sampling.draws(state).dtype == jnp.float32
    assert algorithm.sampling.recorded_draws(state).dtype == jnp.uint32


def test_gradient_steps_follow_the_environment_steps():
    assert bound(unroll_length=3).sampling.steps == 12
    assert bound(unroll_length=3, gradient_steps=5).sampling.steps == 5
    assert bound(False, DATA).sampling.steps == 20


def test_learning_begins_when_the_replay_holds_enough():
    assert bool(bound(learning_starts=10).sampling.enough(sample([0.1, 0.1])))
    assert not bool(bound(learning_starts=11).sampling.enough(sample([0.1, 0.1])))
    assert bool(bound(False, DATA, learning_starts=11).sampling.enough(None))


def test_moments_are_of_what_actors_met_or_of_recorded_steps():
    before = initial_moments(ENV.observation)
    seen = jnp.array([[[1.0]], [[3.0]], [[9.0]]])
    valid = jnp.array([[True], [True], [False]])
    steps: Any = SimpleNamespace(observation=seen, valid=valid)
    online = bound(normalize_observations=True).sampling.moments(ALONE, before, steps, None)
    assert (float(online.weight), float(online.mean[0]), float(online.variance[0])) == (2, 2, 1)
    recorded = jax.tree.map(lambda x: x[None], sample([0.1, 0.1]))
    alone = bound(False, DATA, normalize_observations=True, batch_size=2).sampling
    offline = alone.moments(ALONE, before, None, recorded)
    assert (float(offline.weight), float(offline.mean[0])) == (2.0, 2.5)
    assert bound().sampling.moments(ALONE, before, steps, None) is before


def test_batches_are_joined_and_only_replayed_transitions_get_priorities():
    one = jax.tree.map(lambda x: x[None], transitions(sample([0.1, 0.1]), 0.5))
    both = joined([one, one._replace(reward=-one.reward)])
    np.testing.assert_allclose(both.reward, [[6.0, 3.0, -6.0, -3.0]])
    told: list[Any] = []
    rl: Any = SimpleNamespace(update_priorities=lambda *given: told.append(given) or "replay")
    given = bound().init(jax.random.key(0)).replay
    replayed = jax.tree.map(lambda x: x[None], sample([0.1, 0.1]))
    errors = jnp.array([[1.0, 2.0, 3.0, 4.0]])
    assert update_priorities(rl, given, replayed, errors) == "replay"
    ((_, keys, priorities),) = told
    assert keys is replayed.keys
    np.testing.assert_allclose(priorities, [[1.000001, 2.000001]])
    assert update_priorities(rl, (), None, errors) == ()
