"""FLOPs against numbers worked out by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dovetail.graph.cost import flops


def counted(function: Any, *shapes: tuple[int, ...]) -> int:
    return flops(jax.make_jaxpr(function)(*[jnp.zeros(shape) for shape in shapes]).jaxpr)


def test_a_matrix_product() -> None:
    assert counted(jnp.dot, (3, 5), (5, 7)) == 2 * 3 * 5 * 7


def test_a_batched_matrix_product() -> None:
    assert counted(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (2, 3, 5), (2, 5, 7)) == 420


def test_a_convolution() -> None:
    def convolve(image: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv(image, kernel, (1, 1), "VALID")

    out = 4 * 6 * 6
    assert counted(convolve, (1, 3, 8, 8), (4, 3, 3, 3)) == out * 2 * 3 * 3 * 3


def test_an_elementwise_equation_counts_its_elements() -> None:
    assert counted(jnp.sin, (3, 5)) == 15


def test_a_scan_counts_every_pass() -> None:
    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (c * 2.0, None), x, None, 10)[0]

    assert counted(loop, (3,)) == 30


def test_a_cond_counts_its_dearest_branch() -> None:
    def choose(x: jax.Array) -> jax.Array:
        return jax.lax.cond(True, lambda: jnp.sin(x), lambda: x @ x * jnp.ones(8))

    dear = counted(lambda x: x @ x * jnp.ones(8), (8,))
    assert dear > counted(jnp.sin, (8,))
    assert counted(choose, (8,)) == pytest.approx(dear, abs=1)  # the predicate


def test_jit_counts_what_is_inside() -> None:
    assert counted(jax.jit(jnp.sin), (3, 5)) == 15
