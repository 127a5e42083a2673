from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.envs.interface import ActionSpace, Continuous, Discrete, MultiDiscrete
from dovetail.functions.distributions import Gaussian
from dovetail.networks.actor_critic import ActorCritic

VECTOR = jax.ShapeDtypeStruct((4,), np.float32)
IMAGE = jax.ShapeDtypeStruct((5, 5, 2), np.uint8)


def observations(spec: Any, *batch: int) -> Any:
    """Any observations that fit a spec."""

    def leaf(one: jax.ShapeDtypeStruct) -> np.ndarray:
        rng = np.random.default_rng(0)
        if one.dtype == np.uint8:
            return rng.integers(0, 256, (*batch, *one.shape), dtype=np.uint8)
        return rng.normal(size=(*batch, *one.shape)).astype(np.float32)

    return jax.tree.map(leaf, spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "action"),
    [
        (VECTOR, Discrete(3)),
        (IMAGE, MultiDiscrete((2, 3))),
        ({"camera": IMAGE, "speed": VECTOR}, Continuous(2, bounded=True)),
    ],
    ids=["vector", "image", "dict"],
)
@pytest.mark.parametrize(("recurrent", "shared"), [(0, False), (6, True)])
def test_unroll_equals_steps(spec: Any, action: ActionSpace, recurrent: int, shared: bool) -> None:
    network = ActorCritic(spec, action, (8, 8), "tanh", recurrent, shared)
    params = jax.jit(network.init)(jax.random.key(0))
    seen = observations(spec, 4, 2)
    first = jnp.array([[1, 0], [0, 0], [0, 1], [0, 0]], bool)
    start = jax.tree.map(lambda x: np.ones((2, *x.shape), np.float32), network.initial_carry())

    @jax.jit
    def unroll(params: Any) -> tuple[jax.Array, ...]:
        distribution, values = network.unroll(params, start, seen, first)
        return distribution.entropy(), distribution.mode(), values

    @jax.jit
    def step(params: Any, carry: Any, observation: Any) -> tuple[tuple[jax.Array, ...], Any]:
        distribution, value, carry = network.step(params, carry, observation)
        return (distribution.entropy(), distribution.mode(), value), carry

    whole = [np.asarray(one) for one in unroll(params)]
    for column in range(2):
        carry = jax.tree.map(lambda x: x[column], start)  # noqa: B023
        for t in range(4):
            if first[t, column]:
                carry = network.initial_carry()
            here = jax.tree.map(lambda x: x[t, column], seen)  # noqa: B023
            found, carry = step(params, carry, here)
            for one, expected in zip(found, whole, strict=True):
                np.testing.assert_allclose(one, expected[t, column], rtol=1e-5, atol=1e-5)


def test_the_first_policy_is_nearly_uniform_and_values_differ() -> None:
    network = ActorCritic(VECTOR, Discrete(4), hidden=(16,))
    params = jax.jit(network.init)(jax.random.key(0))
    distribution, values, carry = network.step(params, (), observations(VECTOR, 50))
    assert carry == ()
    np.testing.assert_allclose(distribution.entropy(), np.log(4), atol=1e-3)
    assert values.std() > 0.1


def test_separate_towers_share_no_parameters() -> None:
    network = ActorCritic(VECTOR, Discrete(2), hidden=(8, 8))
    params = jax.jit(network.init)(jax.random.key(0))
    assert set(params) == {"encoder", "policy", "value"}

    def value(params: Any) -> jax.Array:
        return network.step(params, (), jnp.ones(4))[1]

    gradient = jax.grad(value)(params)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradient["policy"]))
    assert all((leaf != 0).any() for leaf in jax.tree.leaves(gradient["value"]))


def test_a_shared_trunk_serves_both_heads() -> None:
    network = ActorCritic(VECTOR, Discrete(2), hidden=(8, 8), shared=True)
    params = jax.jit(network.init)(jax.random.key(0))
    shapes = jax.tree.map(lambda x: x.shape, params)
    assert set(shapes["trunk"]) == {"layer_0", "layer_1"}
    assert shapes["policy"] == {"layer_0": {"weight": (8, 2), "bias": (2,)}}
    assert shapes["value"] == {"layer_0": {"weight": (8, 1), "bias": (1,)}}


def test_no_hidden_layers_put_the_heads_on_the_features() -> None:
    for shared in (False, True):
        network = ActorCritic(VECTOR, Discrete(2), hidden=(), shared=shared)
        params = jax.jit(network.init)(jax.random.key(0))
        x = jnp.array([1.0, 2.0, 3.0, 4.0])
        head = params["value"]["layer_0"]
        np.testing.assert_allclose(
            network.step(params, (), x)[1], (x @ head["weight"] + head["bias"])[0], rtol=1e-6
        )


def test_continuous_deviation_is_a_parameter_that_does_not_see_the_state() -> None:
    network = ActorCritic(VECTOR, Continuous(3, bounded=False))
    params = jax.jit(network.init)(jax.random.key(0))
    params["log_std"] = jnp.array([-1.0, 0.0, 1.0])
    distribution, _ = network.unroll(
        params, (), observations(VECTOR, 2, 5), jnp.zeros((2, 5), bool)
    )
    assert isinstance(distribution, Gaussian)
    assert distribution.mean.shape == (2, 5, 3)
    np.testing.assert_array_equal(
        distribution.log_std, np.broadcast_to([-1.0, 0.0, 1.0], (2, 5, 3))
    )


def test_networks_compare_by_value() -> None:
    assert ActorCritic(VECTOR, Discrete(2)) == ActorCritic(VECTOR, Discrete(2))
    assert ActorCritic(VECTOR, Discrete(2)) != ActorCritic(VECTOR, Discrete(2), shared=True)
    assert hash(ActorCritic(VECTOR, Discrete(2))) == hash(ActorCritic(VECTOR, Discrete(2)))
