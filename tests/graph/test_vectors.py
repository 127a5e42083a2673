"""Arrays as one vector and back, and how that is compiled."""

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.graph.vectors import pack, unpack

LEAVES = (
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.float32(7),
    np.zeros((0, 4), np.float32),
    np.array([8, 9], np.int32),
    np.array([True]),
)


def test_back_and_forth() -> None:
    vector = jax.jit(pack)(LEAVES)
    assert vector.dtype == jnp.float32
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9, 1]
    for found, wanted in zip(jax.jit(unpack)(vector, LEAVES), LEAVES, strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_array_equal(found, wanted)


def test_the_kind_of_number_holds_every_leaf() -> None:
    """A number without a kind of its own counts as the kind that it has."""
    leaves = (jnp.ones(2, jnp.bfloat16), jnp.full((), 1 + 2**-20))
    assert leaves[1].weak_type
    _, found = jax.jit(lambda leaves: unpack(pack(leaves), leaves))(leaves)
    assert float(found) == 1 + 2**-20


def test_each_is_written_into_its_place() -> None:
    """Concatenated or padded, they would be read far beyond their ends."""
    text = jax.jit(pack).lower(LEAVES[:2]).as_text()
    assert text.count("stablehlo.dynamic_update_slice") == 2
    assert "concatenate" not in text and "stablehlo.pad" not in text
