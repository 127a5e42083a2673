import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.errors import UserError
from dovetail.networks.encoder import Encoder


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def spec(*shape: int, dtype: type = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_a_vector_passes_through() -> None:
    encoder = Encoder(spec(3))
    params = jax.jit(encoder.init)(jax.random.key(0))
    x = jnp.array([[1.0, 2.0, 3.0]])
    assert params == {}
    assert encoder.size == 3
    np.testing.assert_array_equal(encoder.apply(params, x), x)
    np.testing.assert_array_equal(encoder.apply(params, x[0]), x[0])


def test_bytes_are_scaled_and_scalars_and_matrices_flattened() -> None:
    encoder = Encoder({"a": spec(2, dtype=np.uint8), "b": spec(), "c": spec(2, 2)})
    observation = {
        "a": jnp.array([[255, 51]], jnp.uint8),
        "b": jnp.array([7.0]),
        "c": jnp.array([[[1.0, 2.0], [3.0, 4.0]]]),
    }
    assert encoder.size == 7
    np.testing.assert_allclose(encoder.apply({}, observation), [[1, 0.2, 7, 1, 2, 3, 4]], rtol=1e-6)


def test_a_dict_of_an_image_and_a_vector() -> None:
    encoder = Encoder({"speed": spec(2), "camera": spec(5, 6, 3, dtype=np.uint8)})
    params = jax.jit(encoder.init)(jax.random.key(0))
    assert list(params) == ["camera"]
    assert encoder.size == 130
    camera = (normal(1, 4, 7, 5, 6, 3) * 40 + 128).astype(np.uint8)
    observation = {"speed": np.full((4, 7, 2), 9.0, np.float32), "camera": camera}
    features = jax.jit(encoder.apply)(params, observation)
    assert features.shape == (4, 7, 130)
    np.testing.assert_array_equal(features[..., 128:], 9.0)
    one = jax.jit(jax.vmap(jax.vmap(lambda o: encoder.apply(params, o))))(observation)
    np.testing.assert_allclose(one, features, atol=1e-5)


def test_channels_may_come_first() -> None:
    first, last = Encoder(spec(2, 5, 6)), Encoder(spec(5, 6, 2))
    params = jax.jit(first.init)(jax.random.key(0))
    assert list(params) == ["observation"]
    image = normal(1, 3, 2, 5, 6)
    np.testing.assert_array_equal(
        first.apply(params, image), last.apply(params, np.moveaxis(image, 1, -1))
    )


def test_a_grey_image_has_one_channel() -> None:
    encoder = Encoder(spec(5, 6, dtype=np.uint8))
    params = jax.jit(encoder.init)(jax.random.key(0))
    assert params["observation"]["layer_0"]["weight"].shape == (9, 16)
    assert encoder.apply(params, jnp.zeros((2, 5, 6), jnp.uint8)).shape == (2, 128)


def test_four_axes_are_refused() -> None:
    with pytest.raises(UserError, match="along an image's channels"):
        Encoder(spec(4, 84, 84, 3)).init(jax.random.key(0))
