"""A user's own network, and the choice among ours."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.envs.interface import Discrete
from dovetail.errors import UserError
from dovetail.networks.actor_critic import ActorCritic
from dovetail.networks.critics import Critics
from dovetail.networks.encoder import Encoder
from dovetail.networks.impala import ResidualCNN
from dovetail.networks.q_network import QNetwork

VECTOR = jax.ShapeDtypeStruct((3,), jnp.float32)
IMAGE = jax.ShapeDtypeStruct((6, 7, 2), jnp.uint8)
KEY = jax.random.key(0)


class Features(nn.Module):
    """A flax module, with an argument that has a default."""

    width: int = 5

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.width)(x.reshape(x.shape[0], -1))


class Sum:
    """A plain pair of functions, without parameters to learn but one."""

    def init(self, key: jax.Array, observation: Any) -> Any:
        return {"scale": jnp.full(1, 2.0)}

    def apply(self, params: Any, observation: Any) -> jax.Array:
        return params["scale"] * observation["a"] + observation["b"].mean((1, 2, 3))[:, None]


class Scalars(Features):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(1)(x)[:, 0]


class Raises(Features):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ jnp.zeros((99, 2))


class Demanding:
    def __init__(self, width: int) -> None:
        self.width = width


class Empty:
    pass


@pytest.mark.parametrize("lead", [(), (4,), (2, 3)])
def test_a_network_sees_one_batch_axis(lead: tuple[int, ...]) -> None:
    encoder = Encoder(IMAGE, Features)
    assert encoder.size == 5 and encoder.learned
    params = encoder.init(KEY)
    images = np.random.default_rng(0).integers(0, 256, (*lead, 6, 7, 2)).astype(np.uint8)
    features = encoder.apply(params, images)
    assert features.shape == (*lead, 5)
    scaled = images.reshape(-1, 6 * 7 * 2).astype(np.float32) / 255
    expected: Any = Features().apply(params, scaled)
    np.testing.assert_allclose(features.reshape(-1, 5), expected, rtol=1e-4, atol=1e-5)


def test_a_network_may_be_a_class_an_object_a_function_or_a_name(tmp_path: Path) -> None:
    file = tmp_path / "nets.py"
    file.write_text(
        "from test_own_network import Features\n\nclass Wide(Features):\n    width: int = 9\n"
    )
    given = (Features, Features(width=6), lambda: Features(width=7), f"{file}:Wide")
    sizes = [Encoder(VECTOR, network).size for network in given]
    assert sizes == [5, 6, 7, 9]
    spec = {"a": jax.ShapeDtypeStruct((1,), jnp.float32), "b": IMAGE}
    seen = {"a": np.ones((2, 1)), "b": np.full((2, 6, 7, 2), 255, np.uint8)}
    encoder = Encoder(spec, Sum())
    np.testing.assert_allclose(encoder.apply(encoder.init(KEY), seen), [[3.0], [3.0]])


def test_heads_and_ensembles_follow_it() -> None:
    both = ActorCritic(VECTOR, Discrete(2), (4,), network=Features)
    params = both.init(KEY)
    assert params["encoder"]["params"]["Dense_0"]["kernel"].shape == (3, 5)
    assert params["policy"]["layer_0"]["weight"].shape == (5, 4)
    assert both.step(params, (), np.zeros((7, 3), np.float32))[1].shape == (7,)
    critics = Critics(VECTOR, 2, hidden=(4,), network=Features)
    drawn = critics.init(KEY)
    kernels = drawn["encoder"]["params"]["Dense_0"]["kernel"]
    assert kernels.shape == (2, 3, 5) and not np.allclose(kernels[0], kernels[1])
    assert critics.apply(drawn, np.zeros((6, 3)), np.zeros((6, 2))).shape == (2, 6, 1)
    noisy = QNetwork(VECTOR, 2, (4,), noisy=True, network=Features)
    assert "weight_noise" in noisy.init(KEY)["advantage"]["layer_0"]  # it reads features


def test_ours_by_name() -> None:
    assert Encoder(IMAGE, "mlp").size == 6 * 7 * 2 and not Encoder(IMAGE, "mlp").learned
    assert Encoder(IMAGE, "cnn").size == Encoder(IMAGE).size == 128
    encoder = Encoder(IMAGE, "impala")
    params = encoder.init(KEY)
    assert encoder.size == 256 and set(params["observation"]) >= {"section_0", "section_2"}
    shown = np.zeros((2, 6, 7, 2), np.uint8)
    assert encoder.apply(params, shown).shape == (2, 256)


def test_the_residual_network_pools_and_adds() -> None:
    # One channel, no blocks: a kernel that keeps the pixel under it, then the maximum of 3 × 3.
    network = ResidualCNN((1,), blocks=0, size=4)
    image = jnp.arange(16, dtype=jnp.float32).reshape(1, 4, 4, 1)
    params = network.init(KEY, (4, 4, 1))
    kernel = np.zeros((9, 1), np.float32)
    kernel[4] = 1
    params["section_0"]["entry"]["weight"] = kernel
    params["output"]["weight"] = np.eye(4, dtype=np.float32)
    np.testing.assert_array_equal(network.apply(params, image), [[5, 7, 13, 15]])


@pytest.mark.parametrize(
    ("network", "said"),
    [
        ("cn", "There is no network 'cn': did you mean 'cnn'"),
        ("impala", r"impala is for images, but the observation has the shape \(3,\): use mlp"),
        ("no_module:Net", "module 'no_module' for the network cannot be loaded"),
        (Scalars, r"Scalars \(.*test_own_network.py:\d+\) returned shape \(2,\) for a batch of 2"),
        (Raises, r"Raises \(.*py:\d+\) raised TypeError in line \d+: dot_general"),
        (Demanding, "Demanding .* cannot be made .*: give each of its arguments a default"),
        (Empty, "Empty .* has no init and apply"),
    ],
)
def test_a_network_that_does_not_fit_is_named(network: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ActorCritic(VECTOR, Discrete(2), network=network).init(KEY)
