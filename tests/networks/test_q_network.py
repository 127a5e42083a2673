"""The network of action values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.networks.q_network import QNetwork

SEEN = jax.ShapeDtypeStruct((3,), jnp.float32)


def built(**options: Any) -> tuple[QNetwork, Any]:
    network = QNetwork(SEEN, 4, (8,), **options)
    return network, network.init(jax.random.key(0))


@pytest.mark.parametrize("lead", [(), (5,), (2, 5)])
def test_outputs_for_any_leading_axes(lead: tuple[int, ...]) -> None:
    network, params = built(outputs=6, dueling=True)
    assert network.apply(params, jnp.ones((*lead, 3))).shape == (*lead, 4, 6)


def test_advantages_of_a_dueling_network_average_nothing() -> None:
    """The mean of the actions' outputs is what the value's own tower puts out."""
    network, params = built(outputs=2, dueling=True)
    x = jnp.array([0.1, -0.2, 0.3])
    state = network._towers()["value"].apply(params["value"], x)
    np.testing.assert_allclose(network.apply(params, x).mean(axis=0), state, rtol=1e-5)


def test_noise_moves_the_weights_and_none_leaves_them() -> None:
    network, params = built(noisy=True, dueling=True)
    x = jnp.array([0.1, -0.2, 0.3])
    one, two = jax.random.normal(jax.random.key(1), (2, network.noise))
    plain, other = network.apply(params, x), network.apply(params, x, one)
    assert not np.allclose(plain, other)
    assert not np.allclose(other, network.apply(params, x, two))
    np.testing.assert_allclose(network.apply(params, x, 0 * one), plain, rtol=1e-6)


def noisy_layers(**options: Any) -> list[str]:
    given: dict[str, Any] = {"observation": SEEN, "actions": 2, "noisy": True} | options
    network = QNetwork(**given)
    params = network.init(jax.random.key(0))
    return [name for name, layer in params["advantage"].items() if "weight_noise" in layer]


@pytest.mark.slow
def test_what_reads_a_vector_is_not_noisy() -> None:
    image = jax.ShapeDtypeStruct((8, 8, 1), jnp.uint8)
    assert noisy_layers(hidden=(4, 4)) == ["layer_1", "layer_2"]
    assert noisy_layers(hidden=()) == ["layer_0"]  # there is no other
    assert noisy_layers(hidden=(4,), observation=image) == ["layer_0", "layer_1"]
    assert noisy_layers(hidden=(4,), recurrent=4) == ["layer_0", "layer_1"]


@pytest.mark.slow
def test_a_memory_steps_as_it_unrolls() -> None:
    network, params = built(recurrent=5)
    seen = jax.random.normal(jax.random.key(1), (6, 2, 3))
    first = jnp.zeros((6, 2), bool).at[3, 1].set(True)
    begin = jnp.full((2, 5), 0.3)
    outputs, carries = network.unroll(params, begin, seen, first)
    carry = begin
    for t in range(6):
        carry = jnp.where(first[t][:, None], network.initial_carry(), carry)
        found, carry = network.step(params, carry, seen[t])
        np.testing.assert_allclose(found, outputs[t], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(carry, carries[t], rtol=1e-5, atol=1e-6)
