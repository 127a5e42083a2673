"""A multi-layer perceptron."""

import math
from dataclasses import dataclass

import jax

from dovetail.networks.layers import Layer, Params, activation, dense, init_layers, noisy_dense


@dataclass(frozen=True)
class MLP:
    """Dense layers with activations on all but the last: [..., inputs] → [..., sizes[-1]]."""

    sizes: tuple[int, ...]
    activation: str = "tanh"
    output_scale: float = 1.0
    """Gain of the last layer's weights; the other layers use √2."""
    activate_output: bool = False
    """Whether the last layer is also a hidden one: with activation and gain √2."""
    noisy_from: int | None = None
    """Index of the first noisy layer (it and all later ones use noise when given); None for none.
    """

    def layers(self, inputs: int) -> dict[str, Layer]:
        """Layer declarations, to pass to `init_layers`."""
        scales = [math.sqrt(2)] * len(self.sizes)
        if not self.activate_output:
            scales[-1] = self.output_scale
        shapes = zip((inputs, *self.sizes[:-1]), self.sizes, scales, strict=True)
        return {
            f"layer_{i}": Layer(*shape, noisy=self._is_noisy(i)) for i, shape in enumerate(shapes)
        }

    def noise(self, inputs: int) -> int:
        """Number of normal samples that `apply` takes as its noise."""
        return sum(layer.noise for layer in self.layers(inputs).values() if layer.noisy)

    def init(self, key: jax.Array, inputs: int) -> Params:
        """New parameters."""
        return init_layers(key, self.layers(inputs))

    def apply(self, params: Params, x: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        """The last layer's output; `noise` holds normal samples for the noisy layers."""
        activate = activation(self.activation)
        for i, size in enumerate(self.sizes):
            layer = params[f"layer_{i}"]
            if noise is None or not self._is_noisy(i):
                x = dense(layer, x)
            else:
                taken = x.shape[-1] + size
                x, noise = noisy_dense(layer, x, noise[:taken]), noise[taken:]
            if i < len(self.sizes) - 1 or self.activate_output:
                x = activate(x)
        return x

    def _is_noisy(self, layer: int) -> bool:
        return self.noisy_from is not None and layer >= self.noisy_from
