import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from dovetail.envs.interface import ActionSpace, Continuous, Discrete, MultiDiscrete
from dovetail.functions.distributions import (
    Categorical,
    Distribution,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
    from_network,
    output_size,
)

LOGITS = np.array([[0.3, -1.2, 2.0], [5.0, 5.0, 4.0]], np.float32)
PROBS = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
OTHER = np.array([[0.0, 1.0, 0.5], [1.0, 2.0, -1.0]], np.float32)
OTHER_PROBS = np.exp(OTHER) / np.exp(OTHER).sum(-1, keepdims=True)
MEAN = np.array([[0.5, -1.0], [2.0, 0.0]], np.float32)
LOG_STD = np.array([-0.5, 0.7], np.float32)
GRID = jnp.array(np.random.default_rng(0).normal(size=(2, 3, 5)), jnp.float32)

both = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])


@both
def test_categorical_equals_scipy(wrap: Callable) -> None:
    x = np.array([2, 0])
    found = wrap(Categorical.log_prob)(Categorical(jnp.array(LOGITS)), x)
    np.testing.assert_allclose(
        found[0], scipy.stats.multinomial.logpmf([0, 0, 1], 1, PROBS[0]), 1e-5
    )
    np.testing.assert_allclose(
        found[1], scipy.stats.multinomial.logpmf([1, 0, 0], 1, PROBS[1]), 1e-5
    )
    entropy = wrap(Categorical.entropy)(Categorical(jnp.array(LOGITS)))
    np.testing.assert_allclose(entropy, scipy.stats.entropy(PROBS, axis=-1), rtol=1e-5)
    kl = wrap(Categorical.kl)(Categorical(jnp.array(LOGITS)), Categorical(jnp.array(OTHER)))
    np.testing.assert_allclose(kl, scipy.stats.entropy(PROBS, OTHER_PROBS, axis=-1), rtol=1e-5)


def test_categorical_mode_takes_the_first_of_equals() -> None:
    np.testing.assert_array_equal(Categorical(jnp.array(LOGITS)).mode(), [2, 0])


@both
def test_categorical_samples_by_its_probabilities(wrap: Callable) -> None:
    logits = jnp.broadcast_to(jnp.array(LOGITS), (20_000, 2, 3))
    samples = wrap(Categorical.sample)(Categorical(logits), jax.random.key(0))
    assert samples.shape == (20_000, 2)
    assert samples.dtype == jnp.int32
    shares = np.stack([(samples == i).mean(axis=0) for i in range(3)], axis=-1)
    np.testing.assert_allclose(shares, PROBS, atol=0.015)


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_categorical_never_samples_what_is_ruled_out(allowed: int) -> None:
    logits = jnp.where(jnp.arange(3) == allowed, 1000.0, -1e9)
    samples = Categorical(jnp.broadcast_to(logits, (5000, 3))).sample(jax.random.key(1))
    assert set(np.asarray(samples).tolist()) == {allowed}


def test_categorical_never_samples_what_has_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the random number is 0, which comes once in eight million draws."""
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape: jnp.zeros(shape))
    logits = jnp.array([[-1e9, 0.0, 0.0], [0.0, -1e9, 0.0], [-1e9, -1e9, 0.0]])
    assert Categorical(logits).sample(jax.random.key(0)).tolist() == [1, 0, 2]


def test_categorical_gradient_of_log_prob_is_one_hot_minus_probabilities() -> None:
    gradient = jax.grad(lambda logits: Categorical(logits).log_prob(jnp.array(1)))(
        jnp.array(LOGITS[0])
    )
    np.testing.assert_allclose(gradient, np.eye(3)[1] - PROBS[0], atol=1e-6)


@both
def test_multi_categorical_is_the_sum_of_its_choices(wrap: Callable) -> None:
    nvec = (2, 3)
    p = jnp.array([[0.1, 0.2, 1.0, 2.0, 3.0], [0.0, 0.0, 0.0, 1.0, 0.0]])
    q = p[::-1]
    x = jnp.array([[1, 0], [0, 2]])
    one, other = MultiCategorical(p, nvec), MultiCategorical(q, nvec)
    left, right = Categorical(p[:, :2]), Categorical(p[:, 2:])
    np.testing.assert_allclose(
        wrap(MultiCategorical.log_prob)(one, x),
        left.log_prob(x[:, 0]) + right.log_prob(x[:, 1]),
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        wrap(MultiCategorical.entropy)(one), left.entropy() + right.entropy(), rtol=1e-6
    )
    np.testing.assert_allclose(
        wrap(MultiCategorical.kl)(one, other),
        left.kl(Categorical(q[:, :2])) + right.kl(Categorical(q[:, 2:])),
        rtol=1e-6,
    )
    np.testing.assert_array_equal(wrap(MultiCategorical.mode)(one), [[1, 2], [0, 1]])


def test_multi_categorical_samples_each_choice() -> None:
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.9, 0.1, 0.2, 0.3, 0.5])), (20_000, 5))
    samples = MultiCategorical(logits, (2, 3)).sample(jax.random.key(0))
    assert samples.shape == (20_000, 2)
    shares = [(samples[:, 0] == 1).mean(), *[(samples[:, 1] == i).mean() for i in range(3)]]
    np.testing.assert_allclose(shares, [0.1, 0.2, 0.3, 0.5], atol=0.015)


@both
def test_gaussian_equals_scipy(wrap: Callable) -> None:
    x = np.array([[0.0, 0.0], [2.5, -3.0]], np.float32)
    std = np.exp(LOG_STD)
    gaussian = Gaussian(jnp.array(MEAN), jnp.array(LOG_STD))
    np.testing.assert_allclose(
        wrap(Gaussian.log_prob)(gaussian, x),
        scipy.stats.norm.logpdf(x, MEAN, std).sum(-1),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        wrap(Gaussian.entropy)(gaussian), scipy.stats.norm.entropy(MEAN, std).sum(-1), rtol=1e-5
    )


def test_gaussian_kl_by_hand() -> None:
    # One entry: log(2/1) + (1² + 3²) / (2·2²) - 1/2 = log 2 + 0.75; the other: the same, so 0.
    one = Gaussian(jnp.array([3.0, 1.0]), jnp.array([0.0, 0.3]))
    other = Gaussian(jnp.array([0.0, 1.0]), jnp.array([np.log(2.0), 0.3]))
    np.testing.assert_allclose(one.kl(other), np.log(2) + 0.75, rtol=1e-6)
    np.testing.assert_allclose(one.kl(one), 0.0, atol=1e-7)


def test_gaussian_samples() -> None:
    gaussian = Gaussian(jnp.broadcast_to(jnp.array(MEAN[0]), (20_000, 2)), jnp.array(LOG_STD))
    samples = gaussian.sample(jax.random.key(0))
    np.testing.assert_allclose(samples.mean(0), MEAN[0], atol=0.05)
    np.testing.assert_allclose(samples.std(0), np.exp(LOG_STD), rtol=0.03)
    np.testing.assert_array_equal(gaussian.mode()[0], MEAN[0])


def test_the_same_key_gives_the_same_sample() -> None:
    """Mean plus deviation times noise: a sign less would be as good, but another run."""
    noise = jax.random.normal(jax.random.key(0), (2,))
    wanted = MEAN[0] + np.exp(LOG_STD) * noise
    one = jnp.array(MEAN[0]), jnp.array(LOG_STD)
    np.testing.assert_allclose(Gaussian(*one).sample(jax.random.key(0)), wanted, rtol=1e-6)
    squashed, _ = SquashedGaussian(*one).sample(jax.random.key(0))
    np.testing.assert_allclose(squashed, np.tanh(wanted), rtol=1e-6)


@pytest.mark.parametrize(
    ("action", "size", "kind", "event"),
    [
        (Discrete(3), 3, Categorical, ()),
        (MultiDiscrete((2, 4)), 6, MultiCategorical, (2,)),
        (Continuous(2, bounded=True), 2, Gaussian, (2,)),
    ],
)
def test_from_network(action: ActionSpace, size: int, kind: type, event: tuple[int, ...]) -> None:
    assert output_size(action) == size

    def one(outputs: jax.Array, key: jax.Array) -> tuple[Distribution, jax.Array, jax.Array]:
        distribution = from_network(action, outputs, jnp.full(size, -1.0))
        sample = distribution.sample(key)
        return distribution, sample, distribution.log_prob(sample)

    outputs = jnp.array(np.random.default_rng(0).normal(size=(5, size)), jnp.float32)
    keys = jax.random.split(jax.random.key(1), 5)
    mapped, samples, log_probs = jax.jit(jax.vmap(one))(outputs, keys)
    assert isinstance(mapped, kind)
    assert samples.shape == (5, *event)
    whole = from_network(action, outputs, jnp.full(size, -1.0))
    np.testing.assert_allclose(whole.log_prob(samples), log_probs, rtol=1e-5)
    np.testing.assert_allclose(mapped.log_prob(samples), log_probs, rtol=1e-5)


def rows(x: Any) -> Any:
    """Leaves [2, 3, n] as a list of the six [n]."""
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), x)
    return [jax.tree.map(operator.itemgetter(i), flat) for i in range(6)]


@pytest.mark.parametrize(
    "one, other",
    [
        (Categorical(GRID), Categorical(GRID[::-1])),
        (MultiCategorical(GRID, (2, 3)), MultiCategorical(GRID[::-1], (2, 3))),
        (Gaussian(GRID, GRID / 5), Gaussian(GRID[::-1], GRID[::-1] / 3)),
    ],
    ids=["categorical", "multi-categorical", "gaussian"],
)
def test_axes_before_the_last_are_batches(one: Any, other: Any) -> None:
    modes, entropies, distances = one.mode(), one.entropy(), one.kl(other)
    log_probs = one.log_prob(other.mode())
    assert entropies.shape == distances.shape == log_probs.shape == (2, 3)
    for i, (row, another) in enumerate(zip(rows(one), rows(other), strict=True)):
        at = divmod(i, 3)
        np.testing.assert_array_equal(modes[at], row.mode())
        np.testing.assert_allclose(entropies[at], row.entropy(), rtol=1e-5)
        np.testing.assert_allclose(distances[at], row.kl(another), rtol=1e-5)
        np.testing.assert_allclose(log_probs[at], row.log_prob(another.mode()), rtol=1e-5)


def test_axes_before_the_last_are_batches_of_squashed_ones() -> None:
    squashed = SquashedGaussian(GRID, GRID / 5)
    samples, densities = squashed.sample(jax.random.key(0))
    assert samples.shape == (2, 3, 5) and densities.shape == (2, 3)
    x = 0.9 * jnp.tanh(GRID[::-1])
    found, clipped = squashed.log_prob(x), Gaussian(GRID, GRID / 5).clipped_log_prob(x)
    for i, (row, own) in enumerate(zip(rows(squashed), rows(x), strict=True)):
        at = divmod(i, 3)
        np.testing.assert_allclose(found[at], row.log_prob(own), rtol=1e-5)
        np.testing.assert_allclose(clipped[at], Gaussian(*row).clipped_log_prob(own), rtol=1e-5)


def test_a_network_without_a_deviation_gets_that_of_one() -> None:
    found = from_network(Continuous(2, bounded=True), jnp.zeros((3, 2)))
    assert isinstance(found, Gaussian)
    np.testing.assert_array_equal(found.log_std, np.zeros((3, 2)))


@both
def test_a_squashed_sample_has_the_density_of_its_transform(wrap: Callable) -> None:
    squashed = SquashedGaussian(jnp.array(MEAN), jnp.broadcast_to(jnp.array(LOG_STD), MEAN.shape))
    action, log_prob = wrap(SquashedGaussian.sample)(squashed, jax.random.key(0))
    x = np.arctanh(np.asarray(action, np.float64))
    normal = scipy.stats.norm.logpdf(x, MEAN, np.exp(LOG_STD))
    wanted = (normal - np.log(1 - np.asarray(action, np.float64) ** 2)).sum(-1)
    np.testing.assert_allclose(log_prob, wanted, rtol=1e-3)
    np.testing.assert_allclose(squashed.mode(), np.tanh(MEAN), rtol=1e-6)


def test_a_squashed_sample_at_its_bounds_has_a_finite_density() -> None:
    far = SquashedGaussian(jnp.array([50.0]), jnp.array([0.0]))
    action, log_prob = far.sample(jax.random.key(0))
    slope = jax.grad(lambda mean: SquashedGaussian(mean, far.log_std).sample(jax.random.key(0))[1])
    assert float(action[0]) == 1.0
    assert 90.0 < float(log_prob) < 110.0  # about 2 × 50
    np.testing.assert_allclose(slope(far.mean), [2.0], rtol=1e-5)


@both
def test_a_squashed_density_is_found_again(wrap: Callable) -> None:
    squashed = SquashedGaussian(jnp.array(MEAN), jnp.broadcast_to(jnp.array(LOG_STD), (2, 2)))
    samples, densities = squashed.sample(jax.random.key(3))
    found = wrap(SquashedGaussian.log_prob)(squashed, samples)
    np.testing.assert_allclose(found, densities, rtol=1e-4, atol=1e-4)
    beyond, on = samples.at[0, 0].set(1.5), samples.at[0, 0].set(1.0)
    assert wrap(SquashedGaussian.log_prob)(squashed, beyond)[0] == -np.inf
    assert np.isfinite(wrap(SquashedGaussian.log_prob)(squashed, on)).all()


@both
def test_a_clipped_gaussian_has_its_tails_on_the_bounds(wrap: Callable) -> None:
    gaussian = Gaussian(jnp.array(MEAN), jnp.array(LOG_STD))
    x = jnp.array([[0.2, -1.0], [1.0, 0.3]])
    found = wrap(Gaussian.clipped_log_prob)(gaussian, x)
    norms: list[list[Any]] = [
        [scipy.stats.norm(mean, std) for mean, std in zip(row, np.exp(LOG_STD), strict=True)]
        for row in MEAN
    ]
    expected = [
        norms[0][0].logpdf(0.2) + norms[0][1].logcdf(-1.0),
        norms[1][0].logsf(1.0) + norms[1][1].logpdf(0.3),
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    outside = jnp.array([[1.7, 0.0], [-2.0, 0.5]])  # as others recorded, before they clipped
    np.testing.assert_allclose(
        wrap(Gaussian.clipped_log_prob)(gaussian, outside), gaussian.log_prob(outside), rtol=1e-5
    )
