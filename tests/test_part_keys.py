"""Random numbers for a batch that is split: each part gets what the whole would have there."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.errors import UserError
from dovetail.keys import for_all, on_axis, part_keys, seed_key

PARTS, SIZE = 4, 2


def parts_of(shape: tuple[int, ...], axis: int, draw: Any) -> list[np.ndarray]:
    """What each part draws of a whole of that shape."""
    keys = jax.random.split(seed_key(3), 2)
    own = [SIZE if i == axis else n for i, n in enumerate(shape)]

    @jax.jit
    def drawn(part: jax.Array) -> jax.Array:
        key = draw(part_keys(keys, part, SIZE, PARTS)[1])
        return jax.random.normal(jax.random.split(jax.random.fold_in(key, 7))[1], own)

    return [np.asarray(drawn(jnp.uint32(part))) for part in range(PARTS)]


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((8,), 0),
        ((8, 3), 0),
        ((5, 8, 3), 1),
        ((SIZE, 8), 1),  # as many features before the items,
        ((8, SIZE), 0),  # or after them,
        ((SIZE, SIZE, 8), 2),  # as a part has items
    ],
)
def test_parts_make_the_whole(shape: tuple[int, ...], axis: int) -> None:
    key = jax.random.split(jax.random.fold_in(jax.random.split(seed_key(3), 2)[1], 7))[1]
    parts = parts_of(shape, axis, lambda key: on_axis(key, axis))
    np.testing.assert_array_equal(np.concatenate(parts, axis), jax.random.normal(key, shape))
    assert np.abs(parts[0] - parts[1]).max() > 1e-3


def test_an_item_may_have_several_rows() -> None:
    key = jax.random.split(jax.random.fold_in(jax.random.split(seed_key(3), 2)[1], 7))[1]
    each = 3

    def drawn(part: int) -> jax.Array:
        own = part_keys(key, jnp.uint32(part), SIZE, PARTS)
        return jax.random.uniform(on_axis(on_axis(own, 0, each), 1), (5, SIZE * each))

    whole = jax.random.uniform(key, (5, PARTS * SIZE * each))
    np.testing.assert_array_equal(np.concatenate([drawn(i) for i in range(PARTS)], 1), whole)


@pytest.mark.parametrize("count", [5, SIZE])
def test_what_is_not_of_items_is_the_same_for_all_parts(count: int) -> None:
    """Also where there are as many as items: a choice among two critics, for two items."""
    key = seed_key(5)
    for part in range(PARTS):
        own = for_all(part_keys(key, jnp.uint32(part), SIZE, PARTS))
        np.testing.assert_array_equal(
            jax.random.permutation(own, count), jax.random.permutation(key, count)
        )


@pytest.mark.parametrize(("shape", "axis"), [((5,), 0), ((), 0), ((3, SIZE), 0), ((SIZE,), 1)])
def test_a_draw_without_the_items_where_they_should_be_is_refused(
    shape: tuple[int, ...], axis: int
) -> None:
    key = part_keys(seed_key(5), jnp.uint32(1), SIZE, PARTS, axis)
    said = f"shape {list(shape)} with keys for its {SIZE} items of a batch, which must stand on"
    with pytest.raises(UserError, match=re.escape(f"{said} axis {axis}")):
        jax.jit(lambda key: jax.random.uniform(key, shape))(key)


def test_keys_of_one_learner_stay_as_they_are() -> None:
    for key in (seed_key(5), jax.random.key(5)):
        assert for_all(key) is key and on_axis(key, 1, 3) is key
