"""A multi-layer perceptron."""

import math
from dataclasses import dataclass

import jax

from dovetail.networks.layers import Layer, Params, activation, dense, init_layers


@dataclass(frozen=True)
class MLP:
    """Dense layers of `sizes`, activated but for the last: [..., inputs] → [..., sizes[-1]]."""

    sizes: tuple[int, ...]
    activation: str = "tanh"
    output_scale: float = 1.0
    """The gain of the last layer's weights; the others' is √2."""
    activate_output: bool = False
    """Whether the last layer is a hidden one too: activated, of gain √2."""

    def layers(self, inputs: int) -> dict[str, Layer]:
        """Its layers, for `init_layers`."""
        scales = [math.sqrt(2)] * len(self.sizes)
        if not self.activate_output:
            scales[-1] = self.output_scale
        shapes = zip((inputs, *self.sizes[:-1]), self.sizes, scales, strict=True)
        return {f"layer_{i}": Layer(*shape) for i, shape in enumerate(shapes)}

    def init(self, key: jax.Array, inputs: int) -> Params:
        """New parameters."""
        return init_layers(key, self.layers(inputs))

    def apply(self, params: Params, x: jax.Array) -> jax.Array:
        """The last layer's output."""
        activate = activation(self.activation)
        for i in range(len(self.sizes)):
            x = dense(params[f"layer_{i}"], x)
            if i < len(self.sizes) - 1 or self.activate_output:
                x = activate(x)
        return x
