from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.networks import layers
from dovetail.networks.layers import Layer, dense, init_layers


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
