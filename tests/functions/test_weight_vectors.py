"""Weights as one vector, and back."""

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.functions.vectors import from_vector, to_vector

TREE = {"a": jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), "b": (jnp.array(7.0), jnp.array([8.0]))}
SHAPES = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), TREE)


def test_leaves_lie_one_behind_the_other() -> None:
    np.testing.assert_array_equal(to_vector(TREE), [1, 2, 3, 4, 5, 6, 7, 8])


def test_a_vector_becomes_the_tree_again() -> None:
    found = from_vector(jnp.arange(10.0, 18.0), SHAPES)
    np.testing.assert_array_equal(found["a"], [[10, 11, 12], [13, 14, 15]])
    np.testing.assert_array_equal(found["b"][0], 16)
    np.testing.assert_array_equal(found["b"][1], [17])
    jax.tree.map(np.testing.assert_array_equal, from_vector(to_vector(TREE), SHAPES), TREE)
