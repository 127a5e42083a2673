"""The leaves of a row: paths, shapes and dtypes, and the errors when inserted rows differ.

JAX is imported lazily, only where trees are flattened: server processes run without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.errors import UserError


@dataclass(frozen=True)
class RowLeaf:
    """One array of a row."""

    path: str
    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        return f"{np.dtype(self.dtype).name}{list(self.shape)}"


def path_name(path: Any) -> str:
    """A leaf's path, formatted alike for dicts, dataclasses and named tuples."""
    from jax.tree_util import keystr

    return keystr(path, simple=True, separator="/") or "row"


def with_paths(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths."""
    from jax.tree_util import tree_flatten_with_path

    return [(path_name(path), x) for path, x in tree_flatten_with_path(tree)[0]]


def structure_of(tree: Any) -> Any:
    """The tree structure, without leaves."""
    from jax.tree import structure

    return structure(tree)


def leaves_of(tree: Any, axes: int = 0) -> list[RowLeaf]:
    """The leaves of one row, from arrays with `axes` extra leading axes."""
    return [
        RowLeaf(path, tuple(np.shape(x))[axes:], np.dtype(getattr(x, "dtype", type(x))))
        for path, x in with_paths(tree)
    ]


def check_leaves(expected: Sequence[RowLeaf], given: Any, axes: tuple[int, ...], what: str) -> None:
    """Raises if rows do not match the table's, naming the first leaf that differs. Rows given as
    `final` may omit leaves."""
    by_path = {leaf.path: leaf for leaf in expected}
    arrays = dict(with_paths(given))
    missing = [leaf.path for leaf in expected if leaf.path not in arrays]
    unknown = [path for path in arrays if path not in by_path]
    # `final` may leave out leaves, rows may not.
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
            wanted = RowLeaf(path, (*axes, *leaf.shape), leaf.dtype)
            raise UserError(
                f"What was inserted as {what} has {path} of {RowLeaf(path, shape, dtype)}, but the "
                f"table's rows want {wanted}: insert what the table was made with."
            )


def check_history(leaves: Sequence[RowLeaf], stacks: Sequence[Any]) -> None:
    """Raises if a history names a missing leaf, or one that does not stack that many frames."""
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


def final_positions(leaves: Sequence[RowLeaf], final: Any) -> list[int]:
    """Position among a row's leaves of each leaf of `final`."""
    by_path = {leaf.path: at for at, leaf in enumerate(leaves)}
    return [by_path[path] for path, _ in with_paths(final)]
