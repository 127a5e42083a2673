"""The scale of values, against written numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.functions.rescaling import rescale, restore


def test_rescaled_by_hand() -> None:
    found = rescale(jnp.array([0.0, 3.0, -8.0, 99.0]), 0.01)
    np.testing.assert_allclose(found, [0.0, 1.03, -2.08, 9.99], rtol=1e-6)


@pytest.mark.parametrize("epsilon", [1e-3, 1e-2, 1.0])
def test_what_is_rescaled_is_restored(epsilon: float) -> None:
    x = jnp.array([-1e5, -300.0, -2.5, -1e-3, 0.0, 1e-3, 0.7, 12.0, 500.0, 1e6])
    np.testing.assert_allclose(restore(rescale(x, epsilon), epsilon), x, rtol=2e-4, atol=1e-6)


def test_the_default_is_the_papers() -> None:
    assert float(rescale(jnp.float32(15.0))) == pytest.approx(3.015)
    assert float(restore(jnp.float32(3.015))) == pytest.approx(15.0, rel=1e-5)
