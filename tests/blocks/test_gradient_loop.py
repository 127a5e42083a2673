from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dovetail.blocks.gradient_loop import (
    KEYS,
    apply_gradients,
    delayed,
    gradient_keys,
    gradient_loop,
)
from dovetail.blocks.learner_state import LearnerState
from dovetail.blocks.replayed import Batch

ALONE: Any = SimpleNamespace(mean=lambda tree: tree, own_keys=lambda keys, items: keys)


def state(**params: float) -> LearnerState:
    zero = jnp.zeros((), jnp.int32)
    weights: Any = {name: jnp.float32(x) for name, x in params.items()}
    nothing: Any = ()
    kept: Any = "replay"
    return LearnerState(weights, {}, {}, nothing, kept, jax.random.key(0), zero, zero)


def batches(rewards: list[list[float]]) -> Batch:
    x = jnp.array(rewards)
    return Batch(x, x, x, x, x, jnp.ones_like(x))


def add(state: LearnerState, batch: Batch, keys: jax.Array) -> Any:
    """Adds the rewards of each batch to w; of every other step to "rare" as well."""
    total = batch.reward.sum()

    def rarely(state: LearnerState) -> Any:
        rare = state.params["rare"] + total
        return state._replace(params=state.params | {"rare": rare}), {"rare": total}

    state = state._replace(params=state.params | {"w": 10 * state.params["w"] + total})
    state, metrics = delayed(rarely, state, 2)
    return state, -batch.reward, {"total": total} | metrics


@pytest.mark.parametrize("delay", [1, 2])
def test_steps_follow_one_another(delay):
    """Both ways: decided in the loop, and while it is traced."""
    given = batches([[1.0, 1.0], [2.0, 1.0], [4.0, 0.0], [5.0, 1.0]])
    keys = gradient_keys(ALONE, state(), given)
    assert keys.shape == (4, KEYS)
    learn = jax.jit(
        lambda enough: gradient_loop(
            add, state(w=0.0, rare=0.0)._replace(replay=()), given, keys, enough, delay=delay
        )
    )
    after, errors, metrics = learn(True)
    assert float(after.params["w"]) == 2346.0
    assert float(after.params["rare"]) == 9.0  # of the second and the fourth step
    assert int(after.steps) == 4
    np.testing.assert_allclose(errors, -given.reward)
    assert {name: float(x) for name, x in metrics.items()} == {"total": 3.75, "rare": 4.5}


def test_nothing_is_learned_before_there_is_enough():
    given = batches([[1.0, 1.0], [2.0, 1.0]])
    keys = gradient_keys(ALONE, state(), given)
    start = state(w=7.0, rare=0.0)
    after, errors, metrics = gradient_loop(add, start, given, keys, jnp.bool_(False))
    assert float(after.params["w"]) == 7.0 and int(after.steps) == 0
    assert after.replay == "replay" and after.key is start.key
    assert not np.any(errors) and float(metrics["total"]) == 0.0


def test_what_does_not_change_is_prepared_for_all_delayed_steps():
    given = batches([[1.0], [2.0], [3.0], [4.0]])
    keys = gradient_keys(ALONE, state(), given)
    seen: list[Any] = []

    def prepare(state: LearnerState, batches: Batch, keys: jax.Array) -> Batch:
        seen.append((batches.reward.shape, keys.shape))
        return batches._replace(goal=batches.reward + state.params["w"])

    def step(state: LearnerState, batch: Batch, keys: jax.Array) -> Any:
        assert not isinstance(batch.goal, tuple)
        w = state.params["w"] + 100.0
        return state._replace(params={"w": w}), batch.goal, {}

    _, goals, _ = gradient_loop(
        step, state(w=0.0), given, keys, jnp.bool_(True), delay=2, prepare=prepare
    )
    assert set(seen) == {((2, 1), (2, KEYS))}
    np.testing.assert_allclose(goals[:, 0], [1.0, 2.0, 203.0, 204.0])


def test_keys_differ_by_step_and_update():
    given = batches([[1.0], [2.0]])
    first = gradient_keys(ALONE, state(), given)
    later = gradient_keys(ALONE, state()._replace(updates=jnp.int32(1)), given)
    words = np.concatenate([jax.random.key_data(x).reshape(-1, 2) for x in (first, later)])
    assert len(np.unique(words, axis=0)) == 4 * KEYS


def test_gradients_are_averaged_and_descended():
    halved: Any = SimpleNamespace(mean=lambda tree: jax.tree.map(lambda x: x / 2, tree))
    sgd = optax.sgd(0.1)
    start = state(actor=1.0, critics=5.0)
    start = start._replace(optimizer={name: sgd.init(x) for name, x in start.params.items()})
    after = apply_gradients(halved, sgd, start, {"actor": jnp.float32(4.0)})
    assert float(after.params["actor"]) == pytest.approx(0.8)
    assert float(after.params["critics"]) == 5.0
