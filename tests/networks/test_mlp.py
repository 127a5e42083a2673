import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.errors import UserError
from dovetail.networks.mlp import MLP


def test_apply_by_hand() -> None:
    mlp = MLP((2, 1), activation="relu")
    params = {
        "layer_0": {"weight": jnp.array([[1.0, -1.0]]), "bias": jnp.array([0.5, 0.5])},
        "layer_1": {"weight": jnp.array([[2.0], [3.0]]), "bias": jnp.array([-1.0])},
    }
    x = jnp.array([[1.0], [-2.0]])
    # x = 1: relu(1.5, -0.5) = (1.5, 0) → 3 - 1; x = -2: relu(-1.5, 2.5) = (0, 2.5) → 7.5 - 1
    np.testing.assert_allclose(jax.jit(mlp.apply)(params, x), [[2.0], [6.5]])
    np.testing.assert_allclose(mlp.apply(params, x[0]), [2.0])


def test_every_batch_size_and_shape_gives_the_same() -> None:
    mlp = MLP((5, 6, 2))
    params = jax.jit(mlp.init, static_argnums=1)(jax.random.key(0), 3)
    x = np.random.default_rng(0).normal(size=(4, 7, 3)).astype(np.float32)
    whole = np.asarray(jax.jit(mlp.apply)(params, x))
    assert whole.shape == (4, 7, 2)
    np.testing.assert_allclose(jax.jit(mlp.apply)(params, x[1]), whole[1], atol=1e-6)
    np.testing.assert_allclose(jax.jit(mlp.apply)(params, x[1, :3]), whole[1, :3], atol=1e-6)
    one_by_one = jax.jit(jax.vmap(lambda row: mlp.apply(params, row)))(x[1])
    np.testing.assert_allclose(one_by_one, whole[1], atol=1e-6)


def test_the_output_is_activated_on_request() -> None:
    params = {"layer_0": {"weight": jnp.array([[-1.0]]), "bias": jnp.zeros(1)}}
    x = jnp.array([3.0])
    np.testing.assert_allclose(MLP((1,), "relu").apply(params, x), [-3.0])
    np.testing.assert_allclose(MLP((1,), "relu", activate_output=True).apply(params, x), [0.0])


def test_init_is_orthogonal_with_gain_root_two_and_the_output_scale() -> None:
    params = jax.jit(MLP((8, 8, 3), output_scale=0.01).init, static_argnums=1)(jax.random.key(0), 8)
    assert list(params) == ["layer_0", "layer_1", "layer_2"]
    for name, gain in [("layer_0", 2.0), ("layer_1", 2.0), ("layer_2", 0.0001)]:
        weight = np.asarray(params[name]["weight"])
        np.testing.assert_allclose(weight.T @ weight, gain * np.eye(weight.shape[1]), atol=1e-5)
        np.testing.assert_array_equal(params[name]["bias"], np.zeros(weight.shape[1]))
    assert not np.allclose(params["layer_0"]["weight"], params["layer_1"]["weight"])


def test_an_unknown_activation_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="no activation 'tan': did you mean 'tanh'"):
        MLP((1,), "tan").apply({}, jnp.zeros(1))
