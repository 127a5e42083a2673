"""Gradients in pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.functions import gradients
from dovetail.functions.gradients import activation_bytes, gradient


def loss(params: jax.Array, samples: jax.Array, shift: float) -> tuple[jax.Array, dict]:
    value = jnp.mean(jnp.square(samples @ params - shift))
    return value, {"loss": value}


@pytest.mark.parametrize("piece", [1, 2, 3, 4, 6, 12, 100])
def test_pieces_make_the_whole(piece: int) -> None:
    samples = jnp.arange(24.0).reshape(12, 2) / 10
    params = jnp.array([0.5, -1.0])
    whole, metrics = jax.grad(loss, has_aux=True)(params, samples, 1.0)
    found, found_metrics = gradient(loss, params, samples, 1.0, piece=piece)
    np.testing.assert_allclose(found, whole, rtol=1e-5)
    np.testing.assert_allclose(found_metrics["loss"], metrics["loss"], rtol=1e-5)


def test_a_count_without_divisors_is_taken_at_once() -> None:
    samples = jnp.arange(14.0).reshape(7, 2)
    jaxpr = jax.make_jaxpr(lambda s: gradient(loss, jnp.ones(2), s, 0.0, piece=4)[0])(samples)
    assert "scan" not in str(jaxpr)
    in_pieces = jax.make_jaxpr(lambda s: gradient(loss, jnp.ones(2), s, 0.0, piece=2)[0])(
        samples[:6]
    )
    assert "scan" in str(in_pieces)
    eleven = jnp.arange(22.0).reshape(11, 2)  # four pieces of three would do; eleven are too many
    jaxpr = jax.make_jaxpr(lambda s: gradient(loss, jnp.ones(2), s, 0.0, piece=3)[0])(eleven)
    assert "scan" not in str(jaxpr)


def test_pieces_along_another_axis_make_the_whole() -> None:
    samples = jnp.arange(36.0).reshape(3, 6, 2) / 10
    params = jnp.array([0.5, -1.0])
    whole, metrics = jax.grad(loss, has_aux=True)(params, samples, 1.0)
    found, found_metrics = gradient(loss, params, samples, 1.0, axis=1, piece=2)
    np.testing.assert_allclose(found, whole, rtol=1e-5)
    np.testing.assert_allclose(found_metrics["loss"], metrics["loss"], rtol=1e-5)


def test_a_piece_has_as_many_samples_as_the_activations_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sample's product takes 2 floats and gives 1: 12 bytes, in an inner program as well."""
    samples = jnp.arange(24.0).reshape(12, 2)
    program = jax.make_jaxpr(jax.jit(loss))(jnp.ones(2), samples, 0.0).jaxpr
    assert activation_bytes(program) == 12 * 12
    for allowed, pieces in ((12 * 12, 1), (12 * 12 - 1, 2), (6 * 12, 2), (4 * 12 + 11, 3)):
        monkeypatch.setattr(gradients, "CACHED", allowed)
        taken = jax.make_jaxpr(lambda s: gradient(loss, jnp.ones(2), s, 0.0))(samples)
        assert (f"length={pieces}" in str(taken)) == (pieces > 1)
    monkeypatch.setattr(gradients, "CACHED", 5)  # less than a sample needs
    taken = jax.make_jaxpr(lambda s: gradient(loss, jnp.ones(2), s, 0.0))(samples)
    assert "length=12" in str(taken)


def test_a_loss_without_products_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "CACHED", 1)

    def sum_of_squares(params: jax.Array, samples: jax.Array) -> tuple[jax.Array, dict]:
        return jnp.mean(jnp.square(samples - params)), {}

    samples = jnp.arange(12.0)
    taken = jax.make_jaxpr(lambda s: gradient(sum_of_squares, jnp.float32(0.0), s))(samples)
    assert "scan" not in str(taken)
