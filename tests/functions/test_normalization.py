from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.functions import normalization

both = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])


@both
def test_moments_by_hand(wrap: Callable) -> None:
    moments = normalization.initial_moments(jnp.zeros(()))

    def see(moments: normalization.Moments, x: jax.Array) -> normalization.Moments:
        sums = normalization.batch_sums(moments, x, jnp.ones_like(x))
        return normalization.update(moments, sums)

    moments = wrap(see)(moments, jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(moments, [2, 2, 1])
    # Of 1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9) / 4
    moments = wrap(see)(moments, jnp.array([5.0, 7.0]))
    np.testing.assert_allclose(moments, [4, 4, 5])


def test_many_batches_of_a_dict_equal_numpy_and_leave_images_alone() -> None:
    rng = np.random.default_rng(0)
    x = {
        "vector": rng.normal(50.0, [0.1, 3.0], (20, 4, 2)).astype(np.float32),
        "image": rng.integers(0, 255, (20, 4, 5, 5, 1), dtype=np.uint8),
    }
    weights = (rng.random((20, 4)) < 0.8).astype(np.float32)
    moments = normalization.initial_moments(jax.tree.map(lambda leaf: leaf[0, 0], x))
    for start in range(0, 20, 5):
        part = jax.tree.map(lambda leaf: jnp.asarray(leaf[start : start + 5]), x)  # noqa: B023
        sums = normalization.batch_sums(moments, part, jnp.asarray(weights[start : start + 5]))
        moments = normalization.update(moments, sums)
    seen = x["vector"][weights > 0].astype(np.float64)
    np.testing.assert_allclose(moments.weight, weights.sum())
    np.testing.assert_allclose(moments.mean["vector"], seen.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.variance["vector"], seen.var(0), rtol=2e-2)

    normal = normalization.normalize(moments, jax.tree.map(jnp.asarray, x))
    assert normal["image"].dtype == jnp.uint8
    np.testing.assert_array_equal(normal["image"], x["image"])
    kept = np.asarray(normal["vector"])[weights > 0]
    np.testing.assert_allclose(kept.mean(0), 0.0, atol=1e-2)
    np.testing.assert_allclose(kept.std(0), 1.0, atol=1e-2)


def test_the_mean_of_the_replicas_sums_is_the_whole_batch() -> None:
    x = jnp.array(np.random.default_rng(0).normal(1.0, 2.0, (2, 6, 3)), jnp.float32)
    weights = jnp.array([[1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 0, 0]], jnp.float32)
    start = normalization.initial_moments(x[0, 0])

    def replica(x: jax.Array, weights: jax.Array) -> normalization.Moments:
        moments = start
        for _ in range(2):
            sums = normalization.batch_sums(moments, x, weights)
            moments = normalization.update(moments, jax.lax.pmean(sums, "replica"))
        return moments

    split = jax.vmap(replica, axis_name="replica")(x, weights)
    whole = start
    for _ in range(2):
        whole = normalization.update(whole, normalization.batch_sums(whole, x, weights))
    for i in range(2):
        np.testing.assert_allclose(split.mean[i], whole.mean, rtol=1e-5)
        np.testing.assert_allclose(split.variance[i], whole.variance, rtol=1e-5)


@both
def test_normalize_and_scale(wrap: Callable) -> None:
    moments = normalization.Moments(jnp.array(9.0), jnp.array(2.0), jnp.array(4.0))
    x = jnp.array([2.0, 4.0, -100.0])
    np.testing.assert_allclose(wrap(normalization.normalize)(moments, x, 3.0), [0, 1, -3])
    np.testing.assert_allclose(wrap(normalization.scale)(moments, x, 3.0), [1, 2, -3])


def test_nothing_seen_changes_nothing() -> None:
    moments = normalization.initial_moments(jnp.zeros(2))
    x = jnp.array([[1.0, -2.0]])
    np.testing.assert_allclose(normalization.normalize(moments, x), x)
    sums = normalization.batch_sums(moments, x, jnp.zeros(1))
    unseen = normalization.update(moments, sums)
    np.testing.assert_array_equal(unseen.variance, [1, 1])
    np.testing.assert_array_equal(unseen.mean, [0, 0])


def test_sums_around_another_mean() -> None:
    # Of 1 and 3: around 0 they sum to 4 and 10, around 2 to 0 and 2.
    sums = normalization.Sums(jnp.float32(2), jnp.float32(4), jnp.float32(10))
    np.testing.assert_allclose(normalization.around(jnp.float32(2), sums), [2, 0, 2])


def test_a_step_of_little_weight_counts() -> None:
    moments = normalization.initial_moments(jnp.zeros(()))
    sums = normalization.batch_sums(moments, jnp.array([4.0]), jnp.array([0.5]))
    np.testing.assert_allclose(normalization.update(moments, sums), [0.5, 4.0, 0.0])


def test_what_never_varied_is_not_divided_by_zero() -> None:
    """Its deviation is taken to be 1e-4; numbers are clipped at 10 unless told otherwise."""
    still = normalization.Moments(jnp.array(9.0), jnp.array(2.0), jnp.array(0.0))
    x = jnp.array([2.0005, 1.0])
    np.testing.assert_allclose(normalization.normalize(still, x), [5.0, -10.0], rtol=1e-3)
    small = jnp.array([5e-4, -1.0])
    np.testing.assert_allclose(normalization.scale(still, small), [5.0, -10.0], rtol=1e-5)


def test_nothing_is_kept_of_images() -> None:
    moments = normalization.initial_moments(jnp.zeros((4, 4, 1), jnp.uint8))
    assert moments.mean.shape == moments.variance.shape == (0,)
