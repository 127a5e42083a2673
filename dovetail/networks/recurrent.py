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
        """Layer declarations, to pass to `init_layers`: reset, update and candidate gates
        joined."""
        return {
            "input": Layer(inputs, 3 * self.size, scale=1.0, blocks=3),
            "carry": Layer(self.size, 3 * self.size, scale=1.0, blocks=3),
        }

    def init(self, key: jax.Array, inputs: int) -> Params:
        """New parameters."""
        return init_layers(key, self.layers(inputs))

    def initial_carry(self) -> jax.Array:
        """Zeros [size], the carry at the start of an episode."""
        return jnp.zeros(self.size)

    def step(self, params: Params, carry: jax.Array, x: jax.Array) -> jax.Array:
        """The next carry, from inputs [..., inputs]."""
        return self._next(params, carry, dense(params["input"], x))

    def unroll(
        self, params: Params, carry: jax.Array, xs: jax.Array, first: jax.Array
    ) -> jax.Array:
        """The carries [T, B, size] after each of xs [T, B, inputs].

        `carry` [B, size] precedes row 0; it is reset to the initial carry where `first` [T, B] is
        true.
        """

        def step(h: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            gates, begins = row
            h = self._next(params, jnp.where(begins[..., None], self.initial_carry(), h), gates)
            return h, h

        # The inputs' part of the gates does not depend on the carry: one product for all rows.
        return jax.lax.scan(step, carry, (dense(params["input"], xs), first))[1]

    def _next(self, params: Params, h: jax.Array, gates: jax.Array) -> jax.Array:
        r_x, z_x, n_x = jnp.split(gates, 3, axis=-1)
        r_h, z_h, n_h = jnp.split(dense(params["carry"], h), 3, axis=-1)
        r = jax.nn.sigmoid(r_x + r_h)
        z = jax.nn.sigmoid(z_x + z_h)
        # The reset gate acts after the product, so that one product gives all three gates.
        n = jnp.tanh(n_x + r * n_h)
        return (1.0 - z) * n + z * h
