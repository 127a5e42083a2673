import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.errors import UserError
from dovetail.networks import cnn


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def as_kernel(weight: jax.Array, kernel: int, stride: int) -> jax.Array:
    """A layer's weight [block row, block column, row, column, channel; outputs] as `lax` has it."""
    blocks, outputs = kernel // stride, weight.shape[1]
    ordered = weight.reshape(blocks, blocks, stride, stride, -1, outputs)
    return ordered.transpose(0, 2, 1, 3, 4, 5).reshape(kernel, kernel, -1, outputs)


def test_a_convolution_by_hand() -> None:
    image = jnp.arange(16.0).reshape(1, 4, 4, 1)
    corners = jnp.array([[1.0], [0.0], [0.0], [10.0]])
    found = cnn.convolve({"weight": corners, "bias": jnp.array([0.5])}, image, 2, 2)
    np.testing.assert_array_equal(found[0, ..., 0], [[50.5, 72.5], [138.5, 160.5]])
    middle = jnp.zeros((9, 2)).at[4, 0].set(1.0).at[5, 1].set(2.0)
    found = cnn.convolve({"weight": middle, "bias": jnp.zeros(2)}, image, 3, 1)
    np.testing.assert_array_equal(found[0], [[[5, 12], [6, 14]], [[9, 20], [10, 22]]])


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3, 16])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (4, 2), (2, 2), (6, 3), (8, 4), (1, 1)])
def test_a_layer_is_a_convolution(kernel: int, stride: int, channels: int) -> None:
    """Values and gradients, whether all that a kernel covers is joined or row after row."""
    x = jnp.asarray(normal(0, 2, 11, 9, channels))
    params = {
        "weight": jnp.asarray(normal(1, kernel * kernel * channels, 5)),
        "bias": jnp.asarray(normal(2, 5)),
    }

    def by_lax(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return params["bias"] + jax.lax.conv_general_dilated(
            x,
            as_kernel(params["weight"], kernel, stride),
            (stride, stride),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    def ours(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return cnn.convolve(params, x, kernel, stride)

    expected, pull_expected = jax.vjp(by_lax, params, x)
    found, pull = jax.vjp(ours, params, x)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3),
        pull(expected),
        pull_expected(expected),
    )


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
