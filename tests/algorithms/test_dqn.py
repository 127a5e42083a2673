"""DQN: what it learns from, and what it refuses."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import Started

import dovetail as dt
from dovetail.algorithms import DQN
from dovetail.blocks.value_based import ItemBatch, ItemRow
from dovetail.errors import UserError
from dovetail.functions.vectors import to_vector
from dovetail.replay.data import DataSpec
from dovetail.replay.device import table as device
from dovetail.replay.table import Table, Transitions

CARTPOLE = dt.envs.resolve("dovetail:CartPole-v1").spec


def bound(**options: Any) -> DQN:
    return DQN(hidden_sizes=(4,), **options).bind(dt.Task(CARTPOLE, num_envs=2, steps=1000))


def test_the_error_is_that_of_the_chosen_action() -> None:
    algorithm = bound(double=False, gamma=0.5)
    params = algorithm.q_network.init(jax.random.key(1))
    observation = jnp.stack([jnp.full((2, 4), 0.1), jnp.full((2, 4), -0.2)])
    rows = ItemRow(
        observation=observation,
        action=jnp.array([[1, 0], [0, 0]]),
        reward=jnp.array([[2.0, 0.0], [3.0, 0.0]]),
        terminated=jnp.array([[False, False], [True, False]]),
    )
    mask = jnp.array([[True, False], [True, False]])
    batch = ItemBatch(rows, mask, jnp.ones(2))
    vector = to_vector(params)
    _, (errors, metrics) = algorithm.loss(vector, vector, batch, None)
    values = algorithm.q_network.apply(params, observation[:, 0])[..., 0]
    after = algorithm.q_network.apply(params, observation[:, 1])[..., 0]
    goals = [2.0 + 0.5 * float(after[0].max()), 3.0]
    wanted = [abs(float(values[0, 1]) - goals[0]), abs(float(values[1, 0]) - goals[1])]
    np.testing.assert_allclose(errors, wanted, rtol=1e-6)
    assert float(metrics["value"]) == pytest.approx((values[0, 1] + values[1, 0]) / 2)


def test_distributions_are_compared_on_the_same_atoms() -> None:
    """Two atoms at 0 and 4 and a discount of a half: the following distribution, ¼ and ¾, stands
    on 1 and 3 after a reward of 1, so ¾·¼ + ¼·¾ of it go to the lower atom."""
    algorithm = bound(distributional=True, atoms=2, v_min=0.0, v_max=4.0)
    taken = jnp.log(jnp.array([[0.5, 0.5], [0.25, 0.75]]))
    following = jnp.log(jnp.array([[0.25, 0.75], [0.25, 0.75]]))
    losses, errors = algorithm.td_loss(
        taken, jnp.array([1.0, 3.0]), jnp.array([0.5, 0.0]), following
    )
    last = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))  # terminated: 3 is ¼ of 0 and ¾ of 4
    np.testing.assert_allclose(losses, [np.log(2), last], rtol=1e-6)
    apart = np.log(2) + 0.375 * np.log(0.375) + 0.625 * np.log(0.625)
    np.testing.assert_allclose(errors, [apart, 0.0], atol=1e-6)  # no error, though not certain
    np.testing.assert_allclose(algorithm.values(taken), [2.0, 3.0], rtol=1e-6)


def test_noise_takes_the_place_of_random_actions() -> None:
    algorithm = bound(noisy=True)
    state = algorithm.init(jax.random.key(0))
    acting = algorithm.acting(state)
    assert float(acting.epsilon) == 0.0
    seen = dt.Timestep(jnp.full(4, 0.1), jnp.float32(0), jnp.array(True))
    act = jax.vmap(lambda key: algorithm.act(acting, (), seen, key)[0])
    found = np.asarray(act(jax.random.split(jax.random.key(1), 200)))
    assert set(found.tolist()) == {0, 1}
    one, two = algorithm.greedy(acting, (), seen)[0], algorithm.greedy(acting, (), seen)[0]
    assert int(one) == int(two)


PARTS = ("double", "dueling", "prioritized", "distributional", "noisy", "n_step")


def with_parts(**on: bool) -> tuple[DQN, Any, Any]:
    """(algorithm, two items to learn from, noise)."""
    n_step = 3 if on.pop("n_step") else 1
    algorithm = bound(**on, n_step=n_step, atoms=3, activation="tanh", gradient_steps=1)
    window = 1 + n_step
    rows = ItemRow(
        observation=jnp.linspace(-1, 1, 2 * window * 4).reshape(2, window, 4),
        action=jnp.tile(jnp.array([[0], [1]]), (1, window)),
        reward=jnp.tile(jnp.array([[1.0], [0.1]]), (1, window)),
        terminated=jnp.zeros((2, window), bool),
    )
    mask = jnp.ones((2, window), bool).at[:, -1].set(False)
    noise = algorithm.noise(jax.random.key(1))
    batch = ItemBatch(rows, mask, jnp.array([1.0, 0.5]))
    return algorithm, batch, None if noise is None else noise[0]


def test_every_combination_of_parts_can_be_traced() -> None:
    for chosen in itertools.product([False, True], repeat=len(PARTS)):
        algorithm, batch, noise = with_parts(**dict(zip(PARTS, chosen, strict=True)))
        params = algorithm.init(jax.random.key(0)).params
        gradients, (errors, _) = jax.eval_shape(
            jax.grad(algorithm.loss, has_aux=True), params, params, batch, noise
        )
        assert gradients.shape == params.shape
        assert errors.shape == (2,)


@pytest.mark.parametrize("alone", [*PARTS, "none", "all"])
def test_a_gradient_step_moves_every_weight(alone: str) -> None:
    algorithm, batch, noise = with_parts(**{part: alone in (part, "all") for part in PARTS})
    params = algorithm.init(jax.random.key(0)).params
    gradients, (errors, _) = jax.jit(jax.grad(algorithm.loss, has_aux=True))(
        params, params, batch, noise
    )
    of_layers = jax.tree.leaves(algorithm.weights(gradients))
    assert min(float(jnp.abs(g).max()) for g in of_layers) > 0
    assert errors.min() > 0 and np.isfinite(errors).all()


def test_nothing_is_learned_before_there_is_enough() -> None:
    algorithm = bound(
        num_envs=2,
        unroll_length=2,
        learning_starts=8,
        batch_size=4,
        buffer_size=40,
        gradient_steps=1,
    )
    seen = []
    with Started(algorithm, "dovetail:CartPole-v1", dt.strategies.Fused()) as running:
        for _ in range(3):
            seen.append(float(running.advance(1).metrics["loss"]))
    assert seen[0] == 0.0 and seen[2] > 0.0  # 2 complete items, then 6, then 10


def test_the_share_of_random_actions_falls() -> None:
    algorithm = bound(
        unroll_length=10, epsilon_start=0.9, epsilon_end=0.1, exploration_fraction=0.5
    )
    state = algorithm.init(jax.random.key(0))
    shares = [
        float(algorithm.acting(state._replace(updates=jnp.int32(n))).epsilon) for n in (0, 5, 50)
    ]
    assert shares == pytest.approx([0.9, 0.74, 0.1])  # of 500 steps, 0, 100 and more


def test_with_recorded_data_few_actions_are_random_from_the_start() -> None:
    data = DataSpec(steps=20, held=20, rows=25)
    algorithm = bound(epsilon_start=0.9, epsilon_end=0.1)
    told = algorithm.bind(dataclasses.replace(algorithm.task, data=data))
    state = told.init(jax.random.key(0))
    assert float(told.acting(state).epsilon) == pytest.approx(0.1)


def test_an_episode_that_was_broken_off_teaches_nothing_wrong() -> None:
    """Environments that are set up anew begin an episode where the last one did not end."""
    table = Table(Transitions(2), 32)
    state = device.init(table, {"x": jnp.int32(0)}, 1)

    def insert(state: Any, *values: int) -> Any:
        rows = {"x": jnp.array(values, jnp.int32)[:, None]}
        none = jnp.zeros((len(values), 1), bool)
        return device.insert(table, state, rows, ends=none, final={"x": rows["x"]})

    stream = jnp.zeros(1, jnp.int32)
    state = insert(state, 1, 2, 3, 4)
    state = device.break_off(table, state, jnp.array([False]), stream)
    assert int(device.size(table, state)) == 2  # 1-2-3 and 2-3-4
    state = device.break_off(table, state, jnp.array([True]), stream)
    state = insert(state, 10, 11, 12)
    _, found = device.sample(table, state, (jnp.arange(5) + 0.5) / 5)
    items = [
        [int(x) for x, is_step in zip(rows, mask, strict=True) if is_step]
        for rows, mask in zip(found.rows["x"], found.mask, strict=True)
    ]
    assert items == [[1, 2], [2], [], [], [10, 11]]
    assert found.rows["x"][1].tolist()[:2] == [2, 3]  # what came after the only step
    assert int(found.size) == 5


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"buffer_size": 0}, "--buffer-size is 0"),
        ({"n_step": 0}, "--n-step is 0"),
        ({"epsilon_end": 1.5}, "--epsilon-end is 1.5"),
        ({"learning_starts": 100, "buffer_size": 50}, "--learning-starts is 100"),
        ({"atoms": 1}, "--atoms is 1: give 2 or more"),
        ({"v_min": 5.0, "v_max": 5.0}, "--v-max is 5.0: give more than 5.0"),
        ({"priority_exponent": -1.0}, "--priority-exponent is -1.0: give 0 to 1"),
        ({"activation": "reloo"}, "no activation 'reloo': did you mean 'relu'?"),
    ],
)
def test_wrong_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        DQN(**options)


def test_a_sample_larger_than_the_replay() -> None:
    algorithm = DQN(gradient_steps=2, batch_size=64, buffer_size=32, learning_starts=1)
    with pytest.raises(UserError, match="sample of 64 items .* table that holds 32"):
        dt.explain(algorithm, "CartPole-v1", "local")


def test_a_batch_that_replicas_cannot_share_is_refused() -> None:
    with pytest.raises(UserError, match="in 2 equal parts, one for each .*choose another number"):
        dt.explain(DQN(batch_size=31), "dovetail:CartPole-v1", dt.strategies.Fused(devices=2))
