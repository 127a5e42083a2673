"""Minibatches of rows and of environments, and the epochs over them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dovetail.blocks.actor_critic import Samples
from dovetail.blocks.minibatches import (
    MinibatchProgress,
    environment_groups,
    epochs_of_minibatches,
    stop_at_divergence,
    time_rows,
)
from dovetail.errors import UserError


def samples(length: int, envs: int, memory: Any = ()) -> Samples:
    """Numbered row by row; observations are vectors of two."""
    number = jnp.arange(length * envs, dtype=jnp.float32).reshape(length, envs)
    observation = jnp.stack([number, -number], axis=-1)
    return Samples(observation, number, (), (), number, number, number, number > 0, memory)


def test_rows_are_the_same_of_every_environment() -> None:
    minibatches = time_rows(samples(4, 2), 2, "PPO")
    assert (minibatches.units, minibatches.count) == (4, 2)
    taken = minibatches.take(jnp.array([3, 1]))
    assert taken.action.tolist() == [6, 7, 2, 3]
    assert taken.observation.tolist() == [[6, -6], [7, -7], [2, -2], [3, -3]]
    assert taken.memory == ()


def test_groups_have_every_second_environment_with_its_memory() -> None:
    minibatches = environment_groups(samples(2, 4, jnp.array([[10, 11, 12, 13]])), 2, "PPO")
    assert (minibatches.units, minibatches.count) == (2, 2)
    taken = minibatches.take(jnp.array([1]))
    assert taken.action.tolist() == [[1, 3], [5, 7]]
    assert taken.observation[1].tolist() == [[5, -5], [7, -7]]
    assert taken.memory.tolist() == [[11, 13]]


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError) as rows:
        time_rows(samples(4, 3), 3, "PPO")
    assert str(rows.value) == (
        "PPO splits an unroll of 4 steps into 3 minibatches, but 4 is not a multiple of 3: "
        "change --unroll-length or --num-minibatches."
    )
    with pytest.raises(UserError) as groups:
        environment_groups(samples(3, 4), 3, "APPO")
    assert str(groups.value) == (
        "Recurrent APPO splits 4 environments into 3 minibatches, but 4 is not a multiple of 3: "
        "change --num-envs or --num-minibatches."
    )


@pytest.mark.parametrize(("split", "size"), [(time_rows, 6), (environment_groups, 9)])
def test_every_epoch_sees_every_sample_once_in_its_own_order(split: Any, size: int) -> None:
    epochs, count = 3, 18 // size

    def step(progress: MinibatchProgress, taken: Samples) -> Any:
        seen, number = progress.params
        seen = seen.at[number].set(jnp.sort(taken.action.ravel()))
        return progress._replace(params=(seen, number + 1)), {"steps": number}

    start = MinibatchProgress((jnp.zeros((epochs * count, size)), 0), (), jnp.array(True))
    minibatches = split(samples(9, 2), count, "PPO")
    after, metrics = epochs_of_minibatches(step, start, minibatches, epochs, jax.random.key(1))
    seen, steps = after.params
    assert steps == epochs * count
    assert metrics["steps"] == (epochs * count - 1) / 2  # the average over all gradient steps
    orders = seen.reshape(epochs, -1)
    assert jnp.sort(orders, axis=1).tolist() == [list(range(18))] * epochs
    assert len({tuple(order) for order in orders.tolist()}) > 1


def test_steps_stop_for_good_once_the_divergence_is_past_its_limit() -> None:
    def progress(weight: float, going: bool = True) -> MinibatchProgress:
        return MinibatchProgress(jnp.float32(weight), jnp.float32(-weight), jnp.array(going))

    def after(before: MinibatchProgress, kl: float) -> list[float]:
        new = progress(2.0)
        return [float(x) for x in stop_at_divergence(before, new, jnp.float32(kl), 0.5)]

    assert after(progress(1.0), 0.75) == [2.0, -2.0, True]
    assert after(progress(1.0), 0.76) == [1.0, -1.0, False]
    assert after(progress(1.0, going=False), 0.0) == [1.0, -1.0, False]
