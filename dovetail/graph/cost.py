"""FLOPs of a jaxpr, counted from its equations.

Matrix products and convolutions count two operations per multiply-add. Any other equation counts
one operation per output element. `scan` counts every iteration, `cond` its most expensive branch,
and `while`, whose length is unknown, a single iteration.
"""

from math import prod
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn


def flops(jaxpr: Jaxpr) -> int:
    """FLOPs of one evaluation, for `explain`: an estimate to compare fragments by."""
    return sum(_equation(eqn) for eqn in jaxpr.eqns)


def _equation(eqn: JaxprEqn) -> int:
    """FLOPs of one equation, with the programs inside it."""
    params: dict[str, Any] = eqn.params
    shapes_in: list[tuple[int, ...]] = [getattr(var.aval, "shape", ()) for var in eqn.invars]
    shapes_out: list[tuple[int, ...]] = [getattr(var.aval, "shape", ()) for var in eqn.outvars]
    match eqn.primitive.name:
        case "dot_general":
            contract, _ = params["dimension_numbers"]
            depth = prod(shapes_in[0][axis] for axis in contract[0])
            return 2 * depth * prod(shapes_out[0])
        case "conv_general_dilated":
            # Each output element takes one multiply-add per weight of its output channel.
            kernel = shapes_in[1]
            out_axis = params["dimension_numbers"].rhs_spec[0]
            return 2 * prod(shapes_out[0]) * prod(kernel) // kernel[out_axis]
        case "scan":
            return params["length"] * flops(params["jaxpr"].jaxpr)
        case "while":
            return flops(params["body_jaxpr"].jaxpr) + flops(params["cond_jaxpr"].jaxpr)
        case "cond":
            return max(flops(branch.jaxpr) for branch in params["branches"])
        case _:
            pass
    # jit, custom_jvp, remat and the like hold their jaxpr in some parameter.
    inner = [_open(value) for value in params.values() if hasattr(_open(value), "eqns")]
    if inner:
        return sum(flops(jaxpr) for jaxpr in inner)
    return sum(map(prod, shapes_out))


def _open(value: Any) -> Any:
    """The jaxpr inside a ClosedJaxpr; any other value unchanged."""
    return getattr(value, "jaxpr", value)
