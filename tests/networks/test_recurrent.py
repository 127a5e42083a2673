import jax
import jax.numpy as jnp
import numpy as np

from dovetail.networks.recurrent import GRU


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_step_by_hand() -> None:
    params = {
        "input": {"weight": jnp.array([[1.0, 2.0, 3.0]]), "bias": jnp.array([0.1, 0.2, 0.3])},
        "carry": {"weight": jnp.array([[0.4, 0.5, 0.6]]), "bias": jnp.array([0.0, 0.0, -0.1])},
    }
    h, x = 0.5, -1.0
    r = 1 / (1 + np.exp(-(x + 0.1 + 0.4 * h)))
    z = 1 / (1 + np.exp(-(2 * x + 0.2 + 0.5 * h)))
    n = np.tanh(3 * x + 0.3 + r * (0.6 * h - 0.1))
    expected = (1 - z) * n + z * h
    for step in (GRU(1).step, jax.jit(GRU(1).step)):
        np.testing.assert_allclose(
            step(params, jnp.array([h]), jnp.array([x])), [expected], rtol=1e-5
        )


def test_unroll_is_the_steps_with_resets() -> None:
    gru = GRU(4)
    params = jax.jit(gru.init, static_argnums=1)(jax.random.key(0), 3)
    assert params["input"]["weight"].shape == (3, 12)
    assert params["carry"]["weight"].shape == (4, 12)
    xs = normal(1, 5, 2, 3)
    first = np.array([[0, 1], [0, 0], [1, 0], [0, 0], [0, 1]], bool)
    start = normal(2, 2, 4)
    found = np.asarray(jax.jit(gru.unroll)(params, start, xs, first))
    step = jax.jit(gru.step)

    for column in range(2):
        carry = start[column]
        for t in range(5):
            carry = gru.initial_carry() if first[t, column] else carry
            carry = step(params, carry, xs[t, column])
            np.testing.assert_allclose(found[t, column], carry, atol=1e-6)


def test_what_came_before_a_reset_gets_no_gradient() -> None:
    gru = GRU(3)
    params = jax.jit(gru.init, static_argnums=1)(jax.random.key(0), 2)
    first = jnp.array([[0], [0], [1], [0]], bool)

    def last(xs: jax.Array) -> jax.Array:
        return gru.unroll(params, jnp.zeros((1, 3)), xs, first)[-1].sum()

    gradient = np.asarray(jax.jit(jax.grad(last))(normal(1, 4, 1, 2)))
    np.testing.assert_array_equal(gradient[:2], 0.0)
    assert (np.abs(gradient[2:]) > 1e-4).all()
