"""A gated recurrent unit: one step at a time when acting, over a whole unroll when learning."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dovetail.networks.layers import Layer, Params, dense, init_layers


@dataclass(frozen=True)
class GRU:
    """A recurrent unit, https://arxiv.org/abs/1406.1078; its carry [..., size] is its output."""

    size: int

    def layers(self, inputs: int) -> dict[str, Layer]:
        """Its layers, for `init_layers`: the reset, update and candidate gates side by side."""
        return {
            "input": Layer(inputs, 3 * self.size, scale=1.0, blocks=3),
            "carry": Layer(self.size, 3 * self.size, scale=1.0, blocks=3),
        }

    def init(self, key: jax.Array, inputs: int) -> Params:
        """New parameters."""
        return init_layers(key, self.layers(inputs))

    def initial_carry(self) -> jax.Array:
        """[size] zeros, how an episode begins."""
        return jnp.zeros(self.size)

    def step(self, params: Params, carry: jax.Array, x: jax.Array) -> jax.Array:
        """The next carry, from inputs [..., inputs]."""
        return self._next(params, carry, dense(params["input"], x))

    def unroll(
        self, params: Params, carry: jax.Array, xs: jax.Array, first: jax.Array
    ) -> jax.Array:
        """The carries [T, B, size] after each of xs [T, B, inputs].

        `carry` [B, size] is the one before row 0. Where `first` [T, B] is true the step begins
        with the initial carry.
        """

        def step(h: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            gates, begins = row
            h = self._next(params, jnp.where(begins[..., None], self.initial_carry(), h), gates)
            return h, h

        # The inputs' share of the gates does not wait for the carry: one product for all rows.
        return jax.lax.scan(step, carry, (dense(params["input"], xs), first))[1]

    def _next(self, params: Params, h: jax.Array, gates: jax.Array) -> jax.Array:
        r_x, z_x, n_x = jnp.split(gates, 3, axis=-1)
        r_h, z_h, n_h = jnp.split(dense(params["carry"], h), 3, axis=-1)
        r = jax.nn.sigmoid(r_x + r_h)
        z = jax.nn.sigmoid(z_x + z_h)
        n = jnp.tanh(n_x + r * n_h)
        return (1.0 - z) * n + z * h
