"""Arguments and results of `call`: marked parts, and the declared results of plain Python."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from dovetail.boundaries import At, Side, here
from dovetail.errors import UserError


class Opened(Protocol):
    """A plain Python function that holds a resource."""

    def __call__(self, *args: Any) -> Any:
        """Numpy arrays in, numpy arrays out."""
        ...

    def close(self) -> None:
        """Releases the resource; safe to call twice."""
        ...


@runtime_checkable
class Opens(Protocol):
    """Plain Python that needs a connection, a file or a process while in use.

    Each worker opens its own function and closes it at the end.
    """

    def open(self) -> Opened:
        """Acquires the resource and returns the function."""
        ...


def _is_mark(part: Any) -> bool:
    return isinstance(part, At)


def unmarked(tree: Any) -> Any:
    """Replaces every marked part of a tree by its value."""
    return jax.tree.map(
        lambda part: part.value if isinstance(part, At) else part, tree, is_leaf=_is_mark
    )


def kept_on(side: Side, made: Any) -> list[bool]:
    """For each leaf of a called function's result, whether it stays on the called side."""
    stays: list[bool] = []
    for part in jax.tree.leaves(made, is_leaf=_is_mark):
        if isinstance(part, At) and part.side != side:
            raise UserError(
                f"{here()}: a function called on the side {side!r} returns a part marked for the "
                f"side {part.side!r}: mark it in iteration, after rl.send(…, to={part.side!r})."
            )
        stays += [isinstance(part, At)] * len(jax.tree.leaves(part))
    return stays


def refuse_wrong_call(side: Any, function: Any) -> None:
    """Raises if the first two arguments of `rl.call` are not a side and a function."""
    if isinstance(side, str) and callable(function):
        return
    wrong, what = ("second", function) if isinstance(side, str) else ("first", side)
    kind = "a marked part of the state" if isinstance(what, At) else f"a {type(what).__name__}"
    raise UserError(
        f"{here()}: rl.call takes the name of a side and the function to run there, then its "
        f"arguments, but its {wrong} argument is {kind}: write rl.call('critic', function, …)."
    )


def refused_mark(state: Any) -> str:
    """The sentence about a marked part of the state that is used without `rl.call`."""
    parts = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_mark)
    found = {jax.tree_util.keystr(path): at.side for path, at in parts if isinstance(at, At)}
    names = " and ".join(f"state{path} on the side {side!r}" for path, side in found.items())
    side = next(iter(found.values()), "critic")
    return (
        f"a part of the state that lives on another side cannot be used here (init marks {names}): "
        f"run a function there with rl.call({side!r}, function, …), which receives the part itself."
    )


def declared(function: Callable[..., Any], result: Any) -> Any:
    """The declared result of plain Python, as a pytree of `jax.ShapeDtypeStruct`."""
    leaves = jax.tree.leaves(result)
    if not leaves or not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        raise UserError(
            f"{here()}: rl.call of plain Python ({_name(function)}) needs to know what it returns: "
            f"give result=, a pytree of jax.ShapeDtypeStruct."
        )
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), result)


def run_python(function: Callable[..., Any], args: Any, result: Any, where: str) -> list[Any]:
    """Calls plain Python on numpy arrays and checks its results against the declared shapes.

    Returns the leaves of the result, converted to the declared dtypes.
    """
    given = jax.tree.map(np.asarray, args)
    made = function(*given)
    if jax.tree.structure(made) != jax.tree.structure(result):
        raise UserError(
            f"{where}: {_name(function)} returned {_shapes(made)}, but was declared to return "
            f"{_shapes(result)}."
        )
    return [
        _checked(function, leaf, shape, where)
        for leaf, shape in zip(jax.tree.leaves(made), jax.tree.leaves(result), strict=True)
    ]


def _shapes(tree: Any) -> str:
    """The shapes in a tree, as text."""
    if tree is None:
        return "nothing"
    return str(jax.tree.map(lambda leaf: list(np.shape(leaf)), tree))


def _checked(function: Callable[..., Any], leaf: Any, shape: Any, where: str) -> np.ndarray:
    array = np.asarray(leaf)
    if array.shape != tuple(shape.shape):
        raise UserError(
            f"{where}: {_name(function)} returned an array of shape {list(array.shape)}, but was "
            f"declared to return {list(shape.shape)}."
        )
    return array.astype(shape.dtype, copy=False)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
