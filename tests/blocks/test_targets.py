import jax
import jax.numpy as jnp
import numpy as np

from dovetail.blocks.targets import random_subset, soft_update


def test_targets_move_by_a_fraction_toward_the_networks():
    target = {"critics": {"w": jnp.array([0.0, 10.0])}}
    params = {"actor": {"w": jnp.ones(1)}, "critics": {"w": jnp.array([4.0, 2.0])}}
    after = soft_update(target, params, 0.25)
    assert set(after) == {"critics"}
    np.testing.assert_allclose(after["critics"]["w"], [1.0, 8.0])


def test_a_subset_of_the_critics_is_whole_and_without_repetition():
    critics = {"w": jnp.arange(5.0)[:, None], "b": 10.0 * jnp.arange(5.0)}
    seen = set()
    for seed in range(12):
        some = random_subset(critics, 2, jax.random.key(seed))
        np.testing.assert_allclose(some["b"], 10 * some["w"][:, 0])
        assert len(set(some["b"].tolist())) == 2
        seen |= set(some["b"].tolist())
    assert seen == {0.0, 10.0, 20.0, 30.0, 40.0}
    assert random_subset(critics, 5, jax.random.key(0)) is critics
