"""A policy as a list of NumPy calls, for readers that have neither Dovetail nor JAX.

The greedy act of a plain network is traced, and each of its primitives is written as one or a few
calls of NumPy functions on named values. A policy that needs more than these functions, such as a
convolution or a memory, has no such list.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core

Operation = dict[str, Any]
"""{"function": a name in NumPy, or "slice", "inputs": names or constants, "arguments": further
positional arguments, "output": a name}."""

LARGEST_CONSTANT = 4096
"""Maximum number of entries of an array that is written into the list."""

SAME = {
    "abs": "absolute",
    "add": "add",
    "add_any": "add",
    "and": "bitwise_and",
    "cos": "cos",
    "div": "divide",
    "eq": "equal",
    "exp": "exp",
    "expm1": "expm1",
    "floor": "floor",
    "ge": "greater_equal",
    "gt": "greater",
    "le": "less_equal",
    "log": "log",
    "log1p": "log1p",
    "lt": "less",
    "max": "maximum",
    "min": "minimum",
    "mul": "multiply",
    "ne": "not_equal",
    "neg": "negative",
    "not": "invert",
    "or": "bitwise_or",
    "pow": "power",
    "round": "rint",
    "sign": "sign",
    "sin": "sin",
    "sqrt": "sqrt",
    "square": "square",
    "sub": "subtract",
    "tanh": "tanh",
}
"""Primitives of JAX → NumPy functions of the same arguments."""

REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_and": "all"}
IDENTITIES = ("copy", "copy_p", "optimization_barrier", "stop_gradient")
INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters that hold the program of a primitive that only calls one."""


class NoOperations(Exception):
    """The policy cannot be written as NumPy calls."""


def numpy_operations(
    function: Callable[..., Any], names: "list[str | NoOperations]", arguments: list[Any]
) -> list[Operation] | None:
    """The calls that compute a function's one output, called "action"; None if that needs more.

    `names` are those of its arguments, of which only shapes and dtypes matter; a `NoOperations`
    stands for one that the reader does not have.
    """
    program = jax.make_jaxpr(function)(*arguments)
    steps = _Steps()
    (output,) = steps.run(program.jaxpr, program.consts, names)
    if isinstance(output, NoOperations):
        return None
    steps.emit("reshape", [output], list(program.out_avals[0].shape), output="action")
    return _needed(steps.operations)


class _Steps:
    """Collects the calls.

    A value is a name, a constant, or a `NoOperations`: what cannot be written matters only if the
    output depends on it.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def emit(self, function: str, inputs: list[Any], *arguments: Any, output: str = "") -> str:
        """Adds a call; returns the name of its output."""
        name = output or f"x{len(self.operations)}"
        # Shapes and indices may hold NumPy's integers, which JSON does not take.
        plain = [[int(x) for x in one] if isinstance(one, list) else one for one in arguments]
        call = {"function": function, "inputs": inputs, "arguments": plain}
        self.operations.append({**call, "output": name})
        return name

    def run(self, jaxpr: Any, consts: Any, inputs: list[Any]) -> list[Any]:
        """Adds the calls of a program; returns its outputs."""
        values: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= {v: _constant_or_none(c) for v, c in zip(jaxpr.constvars, consts, strict=True)}

        def read(atom: Any) -> Any:
            if isinstance(atom, core.Literal):
                shaped: Any = atom.aval
                return _constant_or_none(np.asarray(atom.val, shaped.dtype))
            return values[atom]

        for equation in jaxpr.eqns:
            try:
                outputs = self._equation(equation, [read(atom) for atom in equation.invars])
            except NoOperations as reason:
                outputs = [reason] * len(equation.outvars)
            values |= dict(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, inputs: list[Any]) -> list[Any]:
        name, options = equation.primitive.name, equation.params
        if name in IDENTITIES:
            return inputs
        inner = next((options[key] for key in INNER if key in options), None)
        if inner is not None:
            closed = getattr(inner, "jaxpr", inner)
            return self.run(closed, getattr(inner, "consts", ()), inputs)
        for value in inputs:
            if isinstance(value, NoOperations):
                raise value
        if name in SAME:
            return [self.emit(SAME[name], inputs)]
        if name in REDUCTIONS:
            return [self._reduced(REDUCTIONS[name], inputs[0], options["axes"])]
        write = getattr(self, f"_{name}", None)
        if write is None:
            raise NoOperations(name)
        found = write(equation, inputs)
        return found if isinstance(found, list) else [found]

    def _reduced(self, function: str, value: Any, axes: tuple[int, ...]) -> Any:
        for axis in sorted(axes, reverse=True):
            value = self.emit(function, [value], int(axis))
        return value

    def _dot_general(self, equation: Any, inputs: list[Any]) -> str:
        """A product of a vector or matrix with a matrix; others are not plain networks."""
        left, right = (atom.aval.ndim for atom in equation.invars)
        ((over, under), batched) = equation.params["dimension_numbers"]
        plain = (tuple(over), tuple(under)) == ((left - 1,), (0,)) and not any(map(len, batched))
        if not plain or right > 2:
            raise NoOperations("dot_general")
        return self.emit("matmul", inputs)

    def _reshape(self, equation: Any, inputs: list[Any]) -> str:
        return self.emit("reshape", inputs[:1], list(equation.outvars[0].aval.shape))

    _squeeze = _expand_dims = _reshape

    def _broadcast_in_dim(self, equation: Any, inputs: list[Any]) -> str:
        shape, axes = equation.outvars[0].aval.shape, equation.params["broadcast_dimensions"]
        given = equation.invars[0].aval.shape
        aligned = [1] * len(shape)
        for axis, size in zip(axes, given, strict=True):
            aligned[axis] = size
        found = inputs[0]
        if aligned != list(given):
            found = self.emit("reshape", [found], aligned)
        return found if aligned == list(shape) else self.emit("broadcast_to", [found], list(shape))

    def _transpose(self, equation: Any, inputs: list[Any]) -> str:
        return self.emit("transpose", inputs, list(equation.params["permutation"]))

    def _convert_element_type(self, equation: Any, inputs: list[Any]) -> str:
        dtype = np.dtype(equation.params["new_dtype"])
        if dtype.kind not in "biuf":
            raise NoOperations(str(dtype))
        return self.emit("asarray", inputs, str(dtype))

    def _argmax(self, equation: Any, inputs: list[Any]) -> str:
        (axis,) = equation.params["axes"]
        return self.emit("argmax", inputs, int(axis))

    def _select_n(self, equation: Any, inputs: list[Any]) -> str:
        if len(inputs) != 3:
            raise NoOperations("select_n")
        which, if_false, if_true = inputs
        return self.emit("where", [which, if_true, if_false])

    def _clamp(self, equation: Any, inputs: list[Any]) -> str:
        low, x, high = inputs
        return self.emit("minimum", [self.emit("maximum", [x, low]), high])

    def _integer_pow(self, equation: Any, inputs: list[Any]) -> str:
        return self.emit("power", [*inputs, _constant(np.float32(equation.params["y"]))])

    def _logistic(self, equation: Any, inputs: list[Any]) -> str:
        one = _constant(np.float32(1))
        exponential = self.emit("exp", [self.emit("negative", inputs)])
        return self.emit("divide", [one, self.emit("add", [one, exponential])])

    def _rsqrt(self, equation: Any, inputs: list[Any]) -> str:
        return self.emit("divide", [_constant(np.float32(1)), self.emit("sqrt", inputs)])

    def _is_finite(self, equation: Any, inputs: list[Any]) -> str:
        return self.emit("isfinite", inputs)

    def _concatenate(self, equation: Any, inputs: list[Any]) -> str:
        joined = inputs[0]
        for part in inputs[1:]:
            joined = self.emit("append", [joined, part], int(equation.params["dimension"]))
        return joined

    def _stack(self, equation: Any, inputs: list[Any]) -> str:
        axis = int(equation.params["axis"])
        shape = list(equation.outvars[0].aval.shape)
        alone = [*shape[:axis], 1, *shape[axis + 1 :]]
        stacked, *others = [self.emit("reshape", [part], alone) for part in inputs]
        for part in others:
            stacked = self.emit("append", [stacked, part], axis)
        return stacked

    def _slice(self, equation: Any, inputs: list[Any]) -> str:
        starts, stops = equation.params["start_indices"], equation.params["limit_indices"]
        steps = equation.params["strides"] or (1,) * len(starts)
        return self.emit("slice", inputs, list(starts), list(stops), list(steps))

    def _split(self, equation: Any, inputs: list[Any]) -> list[str]:
        axis, shape = int(equation.params["axis"]), equation.invars[0].aval.shape
        start, found, ones = 0, list[str](), [1] * len(shape)
        for size in equation.params["sizes"]:
            starts, stops = [0] * len(shape), list(shape)
            starts[axis], stops[axis] = start, start + size
            found.append(self.emit("slice", inputs, starts, stops, ones))
            start += size
        return found


def _constant_or_none(value: Any) -> Any:
    try:
        return _constant(value)
    except NoOperations as reason:
        return reason


def _constant(value: Any) -> dict[str, Any]:
    array = np.asarray(value)
    if array.size > LARGEST_CONSTANT or array.dtype.kind not in "biuf":
        raise NoOperations("constant")
    if array.dtype.kind == "f" and not all(map(math.isfinite, array.ravel())):
        raise NoOperations("constant")  # JSON has no infinities
    return {"value": array.tolist(), "dtype": str(array.dtype)}


def _needed(operations: list[Operation]) -> list[Operation]:
    """The calls on which the last one depends."""
    wanted, kept = {operations[-1]["output"]}, list[Operation]()
    for call in reversed(operations):
        if call["output"] in wanted:
            wanted |= {name for name in call["inputs"] if isinstance(name, str)}
            kept.append(call)
    return kept[::-1]
