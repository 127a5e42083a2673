"""Critics that are applied together are independent; what DroQ adds to them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.networks.critics import Critics
from dovetail.networks.policy_network import PolicyNetwork

VECTOR = jax.ShapeDtypeStruct((2,), jnp.float32)
IMAGE = jax.ShapeDtypeStruct((10, 10, 4), jnp.float32)


def test_apply_by_hand() -> None:
    critics = Critics(VECTOR, 1, count=2, hidden=(1,))
    params = {
        "encoder": {},
        "critic": {
            "layer_0": {
                "weight": jnp.array([[[1.0], [2.0], [3.0]], [[1.0], [0.0], [-1.0]]]),
                "bias": jnp.array([[0.0], [0.5]]),
            },
            "layer_1": {"weight": jnp.array([[[2.0]], [[4.0]]]), "bias": jnp.array([[1.0], [0.0]])},
        },
    }
    observation, action = jnp.array([[1.0, 1.0], [0.0, -1.0]]), jnp.array([[2.0], [0.25]])
    # first: relu(1 + 2 + 6) = 9 → 19; relu(-2 + 0.75) = 0 → 1
    # second: relu(1 - 2 + 0.5) = 0 → 0; relu(-0.25 + 0.5) = 0.25 → 1
    found = jax.jit(critics.apply)(params, observation, action)
    np.testing.assert_allclose(found[..., 0], [[19.0, 1.0], [0.0, 1.0]])


def test_each_critic_begins_alone_and_some_can_be_asked() -> None:
    critics = Critics(VECTOR, 0, outputs=3, count=4, hidden=(8,))
    params = critics.init(jax.random.key(0))
    observation = jnp.array([[0.3, -0.7], [1.0, 2.0]])
    whole = critics.apply(params, observation)
    assert whole.shape == (4, 2, 3)
    assert len(np.unique(np.asarray(whole)[:, 0, 0])) == 4
    two = jax.tree.map(lambda x: x[jnp.array([3, 1])], params)
    np.testing.assert_allclose(critics.apply(two, observation), whole[jnp.array([3, 1])], rtol=1e-6)


@pytest.mark.slow
def test_images_have_features_of_their_own() -> None:
    critics = Critics(IMAGE, 2, count=3, hidden=(4,))
    params = critics.init(jax.random.key(0))
    frames = jax.random.uniform(jax.random.key(1), (5, 10, 10, 4))
    assert critics.apply(params, frames, jnp.zeros((5, 2))).shape == (3, 5, 1)
    assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(params))


def test_layer_normalization_forgets_the_scale() -> None:
    critics = Critics(VECTOR, 0, count=2, hidden=(16,), layer_norm=True)
    params = critics.init(jax.random.key(0))
    observation = jnp.array([[0.3, -0.7]])
    near, far = critics.apply(params, observation), critics.apply(params, 1000 * observation)
    np.testing.assert_allclose(near, far, rtol=1e-3)


def test_dropout_keeps_the_mean_and_needs_a_key() -> None:
    critics = Critics(VECTOR, 0, count=2, hidden=(64,), activation="elu", dropout=0.25)
    params = critics.init(jax.random.key(0))
    observation = jnp.array([[0.05, -0.05]])
    keys = jax.random.split(jax.random.key(1), 2000)
    dropped = jax.vmap(lambda key: critics.apply(params, observation, key=key))(keys)
    whole = critics.apply(params, observation)
    assert np.asarray(dropped).std(axis=0).min() > 1e-3
    np.testing.assert_allclose(dropped.mean(axis=0), whole, atol=5e-3)


def test_a_policy_begins_near_the_middle() -> None:
    network = PolicyNetwork(VECTOR, 3, hidden=(8,))
    params = network.init(jax.random.key(0))
    outputs = network.apply(params, jnp.array([[1.0, -1.0], [0.5, 2.0]]))
    assert outputs.shape == (2, 3)
    assert 0.0 < float(jnp.abs(outputs).max()) < 0.1
