"""Random numbers for a batch that is split: each part gets what the whole would have there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.keys import part_keys, seed_key

PARTS, SIZE = 4, 2


@pytest.mark.parametrize(("shape", "axis"), [((8,), 0), ((8, 3), 0), ((5, 8, 3), 1)])
def test_parts_make_the_whole(shape: tuple[int, ...], axis: int) -> None:
    keys = jax.random.split(seed_key(3), 2)
    own = [SIZE if i == axis else n for i, n in enumerate(shape)]

    @jax.jit
    def drawn(part: jax.Array) -> jax.Array:
        key = part_keys(keys, part, SIZE, PARTS)[1]
        return jax.random.normal(jax.random.split(jax.random.fold_in(key, 7))[1], own)

    whole = jax.random.normal(jax.random.split(jax.random.fold_in(keys[1], 7))[1], shape)
    parts = [drawn(jnp.uint32(part)) for part in range(PARTS)]
    np.testing.assert_array_equal(np.concatenate(parts, axis), whole)
    assert np.abs(np.asarray(parts[0]) - np.asarray(parts[1])).max() > 1e-3


def test_what_is_not_of_items_is_the_same_for_all_parts() -> None:
    key = seed_key(5)
    for part in range(PARTS):
        own = part_keys(key, jnp.uint32(part), SIZE, PARTS)
        np.testing.assert_array_equal(
            jax.random.permutation(own, 5), jax.random.permutation(key, 5)
        )
