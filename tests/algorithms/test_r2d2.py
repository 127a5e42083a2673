"""R2D2: what a sequence teaches, and what it does not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import Started

import dovetail as dt
from dovetail.algorithms import R2D2
from dovetail.algorithms.r2d2 import SequenceRow
from dovetail.blocks.value_based import ItemBatch
from dovetail.errors import UserError
from dovetail.functions.rescaling import rescale, restore
from dovetail.functions.vectors import to_vector
from dovetail.strategies import Fused

BURN_IN, LEARNED = 2, 8


def bound(**options: Any) -> R2D2:
    chosen: dict[str, Any] = {"hidden_sizes": (4,), "recurrent": 3, "burn_in": BURN_IN}
    spec = dt.envs.resolve("dovetail:CartPole-v1").spec
    algorithm = R2D2(**{**chosen, "learned": LEARNED, **options})
    return algorithm.bind(dt.Task(spec, num_envs=2, steps=1000))


def sequence() -> tuple[SequenceRow, jax.Array]:
    """Eleven rows: two of burn-in; three steps, the last of which terminates, and what was seen
    after; two steps of an episode that was broken off; three of the next. (rows, mask) [1, 11]."""
    rows = BURN_IN + LEARNED + 1
    mask = np.ones(rows, bool)
    mask[5] = False
    terminated, first = np.zeros(rows, bool), np.zeros(rows, bool)
    terminated[4] = first[6] = first[8] = True
    draw = np.random.default_rng(0)
    fields = SequenceRow(
        observation=draw.normal(size=(rows, 4)).astype(np.float32),
        action=draw.integers(0, 2, rows),
        reward=draw.normal(size=rows).astype(np.float32),
        terminated=terminated,
        first=first,
        memory=draw.normal(size=(rows, 3)).astype(np.float32),
    )
    return jax.tree.map(lambda x: jnp.asarray(x)[None], fields), jnp.asarray(mask)[None]


def read(algorithm: R2D2, params: Any, rows: SequenceRow) -> list[Any]:
    """What the network says of each row, one step at a time."""
    memory, found = rows.memory[0, 0], []
    step = jax.jit(algorithm.q_network.step)
    for t in range(rows.reward.shape[1]):
        if rows.first[0, t]:
            memory = algorithm.initial_carry()
        outputs, memory = step(params, memory, rows.observation[0, t])
        found.append(outputs[:, 0])
    return found


@pytest.mark.parametrize("double", [True, False])
def test_errors_by_hand(double: bool) -> None:
    algorithm = bound(n_step=2, gamma=0.9, double=double)
    params = algorithm.q_network.init(jax.random.key(0))
    target = algorithm.q_network.init(jax.random.key(1))
    rows, mask = sequence()
    loss, (priorities, _) = jax.jit(algorithm.loss)(
        to_vector(params), to_vector(target), ItemBatch(rows, mask, jnp.full(1, 0.5))
    )
    found, later = read(algorithm, params, rows), read(algorithm, target, rows)
    reward = np.asarray(rows.reward[0])

    def best(t: int) -> float:
        return float(restore(later[t][int(np.argmax((found if double else later)[t]))]))

    # row 5 only shows what came after row 4; what came after row 7 is not known
    goals = {
        2: reward[2] + 0.9 * reward[3] + 0.81 * best(4),
        3: reward[3] + 0.9 * reward[4],
        4: reward[4],
        6: reward[6] + 0.9 * best(7),
        8: reward[8] + 0.9 * reward[9] + 0.81 * best(10),
        9: reward[9] + 0.9 * best(10),
    }
    errors = np.array(
        [
            float(found[t][int(rows.action[0, t])]) - float(rescale(jnp.float32(goal)))
            for t, goal in goals.items()
        ]
    )
    size = np.abs(errors)
    huber = np.where(size <= 1, 0.5 * size**2, size - 0.5)
    np.testing.assert_allclose(loss, 0.5 * huber.sum() / LEARNED, rtol=1e-5)
    np.testing.assert_allclose(priorities, [0.9 * size.max() + 0.1 * size.mean()], rtol=1e-5)


def test_the_burn_in_is_read_but_not_learned_from() -> None:
    """Its steps change what is learned through the memory; no gradient passes through them."""
    rows, mask = sequence()
    weights = jnp.ones(1)
    algorithm = bound(n_step=1)

    @jax.jit
    @jax.grad
    def grad(params: Any, rows: Any) -> jax.Array:
        vector = to_vector(params)
        return algorithm.loss(vector, vector, ItemBatch(rows, mask, weights))[0]

    params = algorithm.q_network.init(jax.random.key(0))
    whole = grad(params, rows)
    read_only = rows._replace(reward=rows.reward.at[:, :BURN_IN].add(9.0))
    for a, b in zip(*map(jax.tree.leaves, (whole, grad(params, read_only))), strict=True):
        np.testing.assert_array_equal(a, b)
    other = rows._replace(observation=rows.observation.at[:, 0].add(9.0))
    assert not np.allclose(
        whole["advantage"]["layer_0"]["weight"],
        grad(params, other)["advantage"]["layer_0"]["weight"],
    )


def test_the_memory_is_stored_with_each_step() -> None:
    """Nothing is learned here, so the network's next memory is the one stored with the next row."""
    options: dict[str, Any] = {"burn_in": 1, "learned": 2, "period": 1, "buffer_size": 64}
    algorithm = bound(
        num_envs=2, unroll_length=4, gradient_steps=1, batch_size=2, learning_starts=64, **options
    )
    with Started(algorithm, "dovetail:CartPole-v1?limit=5", Fused()) as running:
        running.advance(3)
        state = running.state
    _, found = state.replay.sample(jnp.linspace(0, 0.99, 16)[None])
    found = jax.tree.map(lambda x: x[0], found)
    rows, steps = found.rows, np.asarray(found.mask)
    _, after = algorithm.q_network.step(
        algorithm.weights(state.params), rows.memory, rows.observation
    )
    begins = np.asarray(rows.first)[:, 1:]
    goes_on = steps[:, :-1] & steps[:, 1:] & ~begins
    assert goes_on.sum() > 10 and begins.sum() > 3 and (~steps).sum() > 3
    memory = np.asarray(rows.memory)[:, 1:]
    np.testing.assert_allclose(memory[goes_on], np.asarray(after)[:, :-1][goes_on], atol=1e-5)
    np.testing.assert_array_equal(memory[begins], 0.0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"recurrent": 0}, "--recurrent is 0: give 1 or more"),
        ({"learned": 0}, "--learned is 0: give 1 or more"),
        ({"burn_in": -1}, "--burn-in is -1: give 0 or more"),
        ({"period": 99}, "--period is 99: give 1 to 20"),
        ({"priority_mix": 1.1}, "--priority-mix is 1.1: give 0 to 1"),
    ],
)
def test_wrong_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        R2D2(**options)
