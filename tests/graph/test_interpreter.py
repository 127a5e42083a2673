"""How the interpreter goes through a batch: one environment after another, and in equal parts."""

import jax.numpy as jnp

from dovetail.graph.interpret import _one_by_one, _parts


def test_one_environment_after_another() -> None:
    found = _one_by_one(lambda params, x, y: (params + x, y))(1.0, jnp.arange(3), jnp.eye(3))
    assert found[0].tolist() == [1, 2, 3]
    assert found[1].tolist() == jnp.eye(3).tolist()


def test_the_parts_of_a_batch() -> None:
    rows = jnp.arange(12).reshape(2, 6)
    assert _parts({"x": rows}, 2)["x"].tolist() == [
        [[0, 1, 2], [6, 7, 8]],
        [[3, 4, 5], [9, 10, 11]],
    ]
