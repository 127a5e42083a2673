"""Rows, batches and gradient steps of Q-learning, by written-out numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dovetail as dt
from dovetail.blocks.value_based import (
    ItemRow,
    Learned,
    batches_of,
    new_priorities,
    recorded_draws,
    recorded_items,
    row_shapes,
    rows_of,
    scan_batches,
)
from dovetail.replay.data import DataSpec
from dovetail.replay.sample import ItemKeys, Sample

CARTPOLE = dt.envs.resolve("dovetail:CartPole-v1").spec
DATA = DataSpec(steps=20, held=20, rows=25)


class OneLearner(dt.RL):
    """With one learner the largest over learners is the value itself."""

    def max(self, tree: Any) -> Any:
        return tree


def sample(mask: list[list[bool]], probabilities: list[float], size: int) -> Sample:
    """One batch [1, n] of windows of two rows, numbered through."""
    n = len(mask)
    return Sample(
        rows=jnp.arange(2 * n).reshape(1, n, 2),
        mask=jnp.array([mask]),
        keys=ItemKeys(slot=jnp.zeros((1, n), jnp.int32), number=jnp.zeros((1, n), jnp.int32)),
        probabilities=jnp.array([probabilities]),
        size=jnp.array([[size] * n]),
        times=jnp.zeros((1, n), jnp.int32),
    )


def test_a_row_is_the_step_and_the_final_row_where_it_led() -> None:
    none: Any = ()
    steps = dt.Trajectory(
        observation="s", action="a", reward="r", terminated="end", next_observation="s'",  # type: ignore[arg-type]
        truncated=none, first=none, valid=none, extras=none, bootstrap=none, carry=none, last=none,
    )  # fmt: skip
    assert rows_of(steps) == (ItemRow("s", "a", "r", "end"), ItemRow("s'", None, None, None))


def test_the_shapes_of_a_row_are_those_of_the_environment() -> None:
    shapes = row_shapes(CARTPOLE)
    assert shapes.observation.shape == (4,)
    assert [x.dtype for x in shapes[1:]] == [jnp.int32, jnp.float32, jnp.bool_]


@pytest.mark.parametrize(
    ("data", "online", "share", "wanted"),
    [
        (None, True, 0.5, 0),
        (DATA, False, 0.5, 8),
        (DATA, True, 0.25, 2),
        (DATA, True, 0.01, 1),
        (DATA, True, 0.99, 7),
    ],
)
def test_the_recorded_items_of_a_batch_of_eight(
    data: DataSpec | None, online: bool, share: float, wanted: int
) -> None:
    task = dt.Task(CARTPOLE, num_envs=2, steps=100, data=data, online=online)
    assert recorded_items(task, 8, share) == wanted


def test_recorded_draws_are_whole_numbers_of_their_own() -> None:
    key = jax.random.key(0)
    draws = recorded_draws(key, 2, 3)
    assert (draws.shape, draws.dtype) == ((2, 3), jnp.uint32)
    assert not np.array_equal(draws, jax.random.bits(key, (2, 3), jnp.uint32))


def test_an_item_without_a_step_has_no_weight() -> None:
    batch = batches_of(OneLearner(), [sample([[True, False], [False, False]], [0.5, 0.5], 2)])
    np.testing.assert_array_equal(batch.weights, [[1.0, 0.0]])
    np.testing.assert_array_equal(batch.rows, [[[0, 1], [2, 3]]])


def test_rare_items_weigh_most() -> None:
    """Of 10 items, (10·p)^-½ is 2, 1 and ½ for probabilities of 1/40, 1/10 and 4/10: a half of that
    after division by the largest."""
    found = sample([[True, False]] * 3, [0.025, 0.1, 0.4], 10)
    batch = batches_of(OneLearner(), [found], importance_exponent=0.5)
    np.testing.assert_allclose(batch.weights, [[1.0, 0.5, 0.25]], rtol=1e-6)


def test_the_items_of_two_samples_stand_side_by_side() -> None:
    """Each sample is weighted by its own largest weight."""
    replayed = sample([[True, False]] * 2, [0.025, 0.1], 10)
    recorded = sample([[True, True]], [0.1], 10)
    batch = batches_of(OneLearner(), [replayed, recorded], importance_exponent=0.5)
    np.testing.assert_allclose(batch.weights, [[1.0, 0.5, 1.0]], rtol=1e-6)
    np.testing.assert_array_equal(batch.rows, [[[0, 1], [2, 3], [0, 1]]])
    np.testing.assert_array_equal(batch.mask[0, :, 1], [False, False, True])


def test_only_replayed_items_get_priorities_and_none_is_zero() -> None:
    keys = ItemKeys(slot=jnp.zeros((1, 2), jnp.int32), number=jnp.zeros((1, 2), jnp.int32))
    found = new_priorities(jnp.array([[0.0, 2.0, 5.0]]), keys)
    np.testing.assert_allclose(found, [[1e-6, 2.000001]], rtol=1e-6)


def add(old: Learned, x: jax.Array, y: jax.Array) -> tuple[Learned, Any]:
    """The parameters less x·y; the target network moves half of the way to them."""
    params = old.params - x * y
    target = (params + old.target) / 2
    return Learned(params, target, old.optimizer + 1), (jnp.array([x, y]), {"loss": x})


def test_gradient_steps_follow_each_other() -> None:
    """10 - 1·2 = 8, then 8 - 3·4 = -4; the target network 4, then 0."""
    start = Learned(jnp.float32(10), jnp.float32(0), jnp.int32(0))
    batches = jnp.array([1.0, 3.0]), jnp.array([2.0, 4.0])
    end, errors, metrics = scan_batches(add, start, batches, jnp.array(True))
    assert [float(x) for x in end] == [-4.0, 0.0, 2.0]
    assert errors.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert float(metrics["loss"]) == 2.0


def test_nothing_is_learned_unless_there_is_enough() -> None:
    start = Learned(jnp.float32(10), jnp.float32(0), jnp.int32(0))
    batches = jnp.array([1.0, 3.0]), jnp.array([2.0, 4.0])
    end, _, metrics = scan_batches(add, start, batches, jnp.array(False))
    assert [float(x) for x in end] == [10.0, 0.0, 0.0]
    assert float(metrics["loss"]) == 0.0
