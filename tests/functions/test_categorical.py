"""Distributions over atoms, moved by rewards and put back on the atoms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.functions.categorical import cross_entropy, evenly_spaced, expected, project


def test_atoms_are_evenly_spaced() -> None:
    np.testing.assert_allclose(evenly_spaced(-1.0, 2.0, 4), [-1, 0, 1, 2], atol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_what_falls_between_two_atoms_is_shared(wrap: object) -> None:
    atoms = jnp.array([0.0, 1.0, 2.0, 3.0])
    probabilities = jnp.array([[0.0, 1.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.5], [0.1, 0.2, 0.3, 0.4]])
    reward, discount = jnp.array([0.25, 2.0, 5.0]), jnp.array([0.5, 0.0, 1.0])
    moved = wrap(project)(atoms, probabilities, reward, discount)  # type: ignore[operator]
    # 0.25 + 0.5 × 1 = 0.75; the episode ended: 2; everything beyond the last atom: 3
    wanted = [[0.25, 0.75, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    np.testing.assert_allclose(moved, wanted, atol=1e-6)


def test_within_the_atoms_the_mean_moves_as_it_should() -> None:
    atoms = evenly_spaced(-10.0, 10.0, 21)
    logits = jax.random.normal(jax.random.key(0), (5, 21))
    reward, discount = jnp.linspace(-1.0, 1.0, 5), jnp.full(5, 0.5)
    moved = project(atoms, jax.nn.softmax(logits), reward, discount)
    np.testing.assert_allclose(moved.sum(-1), np.ones(5), rtol=1e-5)
    wanted = reward + discount * expected(atoms, logits)
    np.testing.assert_allclose((moved * atoms).sum(-1), wanted, atol=1e-4)


def test_cross_entropy_by_hand() -> None:
    logits = jnp.log(jnp.array([0.5, 0.25, 0.25]))
    found = cross_entropy(logits, jnp.array([0.0, 1.0, 0.0]))
    np.testing.assert_allclose(found, np.log(4), rtol=1e-6)
