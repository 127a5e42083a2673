from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.networks import layers
from dovetail.networks.layers import Layer, dense, dense_each, init_layers, noisy_dense


def test_every_block_is_orthogonal_and_none_is_drawn_twice() -> None:
    declared = {"a": Layer(4, 8, scale=1.0), "b": {"c": Layer(4, 6, scale=3.0, blocks=2)}}
    params = jax.jit(lambda key: init_layers(key, declared))(jax.random.key(0))
    wide, blocks = np.asarray(params["a"]["weight"]), np.asarray(params["b"]["c"]["weight"])
    np.testing.assert_allclose(wide @ wide.T, np.eye(4), atol=1e-5)
    for block in (blocks[:, :3], blocks[:, 3:]):
        np.testing.assert_allclose(block.T @ block, 9 * np.eye(3), atol=1e-5)
    assert not np.allclose(blocks[:, :3], blocks[:, 3:])
    np.testing.assert_array_equal(params["b"]["c"]["bias"], np.zeros(6))


@pytest.mark.parametrize("small", [0, 2**19], ids=["large", "small"])
def test_dense_and_its_gradients_by_hand(monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr(layers, "SMALL", small)
    params = {"weight": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "bias": jnp.array([10.0, 20.0])}
    x = jnp.array([[[1.0, 0.0]], [[1.0, 2.0]]])
    pull = jnp.array([[[1.0, 0.0]], [[0.0, 5.0]]])

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (dense(params, x) * pull).sum()

    np.testing.assert_array_equal(dense(params, x), [[[11, 22]], [[17, 30]]])
    np.testing.assert_array_equal(dense(params, x[1, 0]), [17, 30])
    by_params, by_x = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
    np.testing.assert_array_equal(by_params["weight"], [[1, 5], [0, 10]])
    np.testing.assert_array_equal(by_params["bias"], [1, 5])
    np.testing.assert_array_equal(by_x, [[[1, 3]], [[10, 20]]])


def test_noise_deviates_by_the_products_of_its_parts() -> None:
    params = {
        "weight": jnp.array([[1.0, 2.0], [3.0, 4.0]]),
        "bias": jnp.array([10.0, 20.0]),
        "weight_noise": jnp.array([[0.1, 0.2], [0.3, 0.4]]),
        "bias_noise": jnp.array([0.5, 0.6]),
    }
    noise = jnp.array([4.0, -1.0, 9.0, -16.0])  # scaled: 2, -1 of the inputs, 3, -4 of the outputs
    weight = params["weight"] + params["weight_noise"] * jnp.outer(
        jnp.array([2.0, -1.0]), jnp.array([3.0, -4.0])
    )
    bias = params["bias"] + params["bias_noise"] * jnp.array([3.0, -4.0])
    x = jnp.array([[1.0, 0.0], [0.5, 2.0]])
    np.testing.assert_allclose(noisy_dense(params, x, noise), x @ weight + bias, rtol=1e-6)


def test_a_noisy_layer_begins_with_small_deviations() -> None:
    params = init_layers(jax.random.key(0), {"a": Layer(16, 2, scale=1.0, noisy=True)})["a"]
    assert params["weight_noise"].tolist() == [[0.125] * 2] * 16
    assert params["bias_noise"].tolist() == [0.125] * 2


@pytest.mark.parametrize("outputs", [1, 5])
def test_several_networks_at_once_are_each_alone(outputs: int) -> None:
    draw = np.random.default_rng(0).normal
    shapes = {"weight": (3, 4, outputs), "bias": (3, outputs)}
    params = {name: jnp.asarray(draw(size=shape), jnp.float32) for name, shape in shapes.items()}
    x = jnp.asarray(draw(size=(3, 7, 4)), jnp.float32)
    pull = jnp.asarray(draw(size=(3, 7, outputs)), jnp.float32)

    def together(params: Any, x: jax.Array) -> jax.Array:
        return (dense_each(params, x) * pull).sum()

    def apart(params: Any, x: jax.Array) -> jax.Array:
        return (jax.vmap(lambda p, x: x @ p["weight"] + p["bias"])(params, x) * pull).sum()

    np.testing.assert_allclose(together(params, x), apart(params, x), rtol=1e-5)
    found, wanted = (jax.grad(f, argnums=(0, 1))(params, x) for f in (together, apart))
    for mine, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-5)
