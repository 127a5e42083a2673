"""The leaves of a row: their paths, shapes and types, and the sentences when others come."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dovetail.errors import UserError


@dataclass(frozen=True)
class Leaf:
    """One array of a row."""

    path: str
    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        return f"{np.dtype(self.dtype).name}{list(self.shape)}"


def path_name(path: Any) -> str:
    """A leaf's path, the same for dictionaries, dataclasses and named tuples."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "row"


def leaves_of(tree: Any, axes: int = 0) -> list[Leaf]:
    """The leaves of a row from arrays that have `axes` more axes in front."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [
        Leaf(path_name(path), tuple(np.shape(x))[axes:], np.dtype(getattr(x, "dtype", type(x))))
        for path, x in found
    ]


def check_leaves(expected: Sequence[Leaf], given: Any, axes: tuple[int, ...], what: str) -> None:
    """Refuses rows that are not as the table's, naming the first leaf that differs."""
    by_path = {leaf.path: leaf for leaf in expected}
    found, _ = jax.tree_util.tree_flatten_with_path(given)
    arrays = {path_name(path): x for path, x in found}
    missing = [leaf.path for leaf in expected if leaf.path not in arrays]
    unknown = [path for path in arrays if path not in by_path]
    if unknown or (missing and what == "rows"):
        differs = f"has {unknown[0]!r}, unlike" if unknown else f"lacks {missing[0]!r} of"
        raise UserError(
            f"What was inserted as {what} {differs} the table's rows ({', '.join(by_path)}): "
            "insert the structure that the table was made with."
        )
    for path, x in arrays.items():
        leaf = by_path[path]
        dtype, shape = np.dtype(getattr(x, "dtype", type(x))), tuple(np.shape(x))
        if dtype != leaf.dtype or shape != (*axes, *leaf.shape):
            wanted = Leaf(path, (*axes, *leaf.shape), leaf.dtype)
            raise UserError(
                f"What was inserted as {what} has {path} of {Leaf(path, shape, dtype)}, but the "
                f"table's rows want {wanted}: insert what the table was made with."
            )


def check_history(leaves: Sequence[Leaf], stacks: Sequence[Any]) -> None:
    """Refuses a history of a leaf that is not there, or no stack of so many frames."""
    by_path = {leaf.path: leaf for leaf in leaves}
    for stack in stacks:
        leaf = by_path.get(stack.path)
        if leaf is None:
            raise UserError(
                f"A history names {stack.path!r}, which is no leaf of the rows: "
                f"choose from {', '.join(by_path)}."
            )
        axes = len(leaf.shape)
        if not -axes <= stack.axis < axes or leaf.shape[stack.axis] != stack.frames:
            raise UserError(
                f"The history of {stack.path} has {stack.frames} frames along axis {stack.axis}, "
                f"but that leaf is {leaf}: give its own number and axis."
            )


def final_positions(leaves: Sequence[Leaf], final: Any) -> list[int]:
    """Where among a row's leaves each leaf of `final` belongs."""
    by_path = {leaf.path: at for at, leaf in enumerate(leaves)}
    found, _ = jax.tree_util.tree_flatten_with_path(final)
    return [by_path[path_name(path)] for path, _ in found]
