"""Which leaves of a learner's state acting uses."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.training.launch import acting_leaves


class Held(NamedTuple):
    params: Any
    optimizer: Any
    key: jax.Array
    updates: jax.Array


STATE = Held({"a": jnp.ones(2), "b": jnp.ones(3)}, jnp.zeros(2), jax.random.key(0), jnp.zeros(()))


def test_acting_that_selects_uses_what_it_selects() -> None:
    assert acting_leaves(lambda state: state.params, STATE, 1) == [0, 1]


def test_acting_may_compute() -> None:
    fold = jax.random.fold_in
    assert acting_leaves(lambda state: fold(state.key, state.updates), STATE, 1) == [3, 4]
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), STATE)
    assert acting_leaves(lambda state: fold(state.key, state.updates), many, 2) == [3, 4]


def test_acting_that_uses_nothing_watches_everything() -> None:
    assert acting_leaves(lambda state: (), STATE, 1) == [0, 1, 2, 3, 4]
