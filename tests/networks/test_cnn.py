import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.errors import UserError
from dovetail.networks import cnn


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_patches_by_hand() -> None:
    image = jnp.arange(16).reshape(1, 4, 4, 1)
    found = cnn.patches(image, kernel=2, stride=2)
    np.testing.assert_array_equal(
        found[0], [[[0, 1, 4, 5], [2, 3, 6, 7]], [[8, 9, 12, 13], [10, 11, 14, 15]]]
    )
    found = cnn.patches(image, kernel=3, stride=1)
    assert found.shape == (1, 2, 2, 9)
    np.testing.assert_array_equal(found[0, 1, 0], [4, 5, 6, 8, 9, 10, 12, 13, 14])


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (4, 2), (2, 2), (6, 3), (1, 1)])
def test_patches_cover_what_a_convolution_covers(kernel: int, stride: int) -> None:
    """A kernel of ones sums each patch, whatever the order of a patch's entries."""
    x = jnp.asarray(normal(0, 2, 11, 9, 3))
    found = cnn.patches(x, kernel, stride).sum(axis=-1)
    ones = jnp.ones((kernel, kernel, 3, 1))
    expected = jax.lax.conv_general_dilated(
        x, ones, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(found, expected[..., 0], atol=1e-5)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (4, 2)])
def test_a_layer_is_a_convolution(kernel: int, stride: int) -> None:
    """Each entry of a patch, found by its place, meets that place's weight."""
    x = jnp.asarray(normal(0, 2, 8, 8, 3))
    weight = jnp.asarray(normal(1, kernel * kernel * 3, 5))
    places = jnp.arange(kernel * kernel * 3).reshape(1, kernel, kernel, 3)
    order = cnn.patches(places, kernel, stride).reshape(-1)
    as_kernel = weight[jnp.argsort(order)].reshape(kernel, kernel, 3, 5)
    expected = jax.lax.conv_general_dilated(
        x, as_kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(cnn.patches(x, kernel, stride) @ weight, expected, atol=1e-4)


def test_nature_cnn_has_the_papers_shapes() -> None:
    network = cnn.for_image((84, 84, 4))
    assert network == cnn.NATURE
    params = jax.eval_shape(lambda key: network.init(key, (84, 84, 4)), jax.random.key(0))
    shapes = {name: layer["weight"].shape for name, layer in params.items()}
    assert shapes == {
        "layer_0": (8 * 8 * 4, 32),
        "layer_1": (4 * 4 * 32, 64),
        "layer_2": (3 * 3 * 64, 64),
        "output": (7 * 7 * 64, 512),
    }


def test_small_images_of_any_batch_and_dtype() -> None:
    network = cnn.for_image((10, 10, 4))
    assert network == cnn.SMALL
    params = jax.jit(network.init, static_argnums=1)(jax.random.key(0), (10, 10, 4))
    images = (normal(1, 2, 3, 10, 10, 4) * 40 + 128).astype(np.uint8)
    apply = jax.jit(network.apply)
    features = np.asarray(apply(params, images))
    assert features.shape == (2, 3, 128)
    assert features.std() > 0
    np.testing.assert_allclose(apply(params, images[1, 2]), features[1, 2], atol=1e-5)
    np.testing.assert_allclose(apply(params, images / np.float32(255)), features, atol=1e-5)
    flags = images > 127
    np.testing.assert_allclose(
        apply(params, flags), apply(params, flags.astype(np.float32)), atol=1e-6
    )


def test_images_smaller_than_the_kernel_are_refused() -> None:
    with pytest.raises(UserError, match="kernel 3 got an image of 2×5"):
        cnn.SMALL.init(jax.random.key(0), (2, 5, 1))


def test_a_stride_that_does_not_divide_its_kernel_is_refused() -> None:
    with pytest.raises(UserError, match="kernel 3 and stride 2"):
        cnn.CNN(((4, 3, 2),), 8).init(jax.random.key(0), (9, 9, 1))
