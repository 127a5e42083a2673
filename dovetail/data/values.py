"""Checks a dataset's values: finite numbers, and choices within their spaces."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from dovetail.data.blocks import last_rows
from dovetail.data.hdf5 import Array, Piece
from dovetail.data.metadata import Metadata
from dovetail.data.spaces import Space, leaves
from dovetail.errors import UserError


def check_values(
    folder: Path,
    metadata: Metadata,
    lengths: Array,
    arrays: dict[str, Array],
    pieces: Sequence[Piece],
) -> None:
    """Raises if observations, actions or rewards are not finite, or choices lie outside their
    space; names the first. `lengths` are those of all episodes."""
    for column in metadata.columns:
        if column.dtype.kind != "f" or column.path.startswith("infos/"):
            continue
        array = arrays[column.path]
        with np.errstate(invalid="ignore", over="ignore"):
            fine = np.isfinite(array.sum())  # one pass: a NaN or infinity always survives a sum
        if not fine and not np.isfinite(array).all():
            raise _wrong(folder, column.path, array, ~np.isfinite(array), pieces)
    observed = leaves(metadata.observation, "observations")
    for path, space in (*observed, *leaves(metadata.action, "actions")):
        bounds = _choices(space)
        if bounds is None:
            continue
        array = arrays[path]
        wrong = (array < bounds[0]) | (array > bounds[1])
        # The extra row after an episode holds no action.
        if wrong.any() and path.startswith("actions"):
            wrong[last_rows(pieces, lengths)] = False
        if wrong.any():
            raise _wrong(folder, path, array, wrong, pieces, f", which is outside of {space}")


def _choices(space: Space) -> tuple[Any, Any] | None:
    """(lowest, highest) of a discrete space; None for others."""
    match space:
        case spaces.Discrete():
            return space.start, space.start + space.n - 1
        case spaces.MultiDiscrete():
            return space.start, space.start + space.nvec - 1
        case spaces.MultiBinary():
            return 0, 1
        case _:
            return None


def _wrong(
    folder: Path,
    path: str,
    array: Array,
    wrong: Array,
    pieces: Sequence[Piece],
    why: str = "",
) -> UserError:
    """The error for the first value marked as wrong."""
    row = int(np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1))[0])
    ends = np.cumsum([piece.stop - piece.start for piece in pieces])
    at = int(np.searchsorted(ends, row, side="right"))
    # The row within its piece, counted from the piece's end.
    step = row - int(ends[at]) + pieces[at].stop
    value = array[row][wrong[row]].ravel()[0]
    return UserError(
        f"The dataset {folder} has {value} in {path} of episode {pieces[at].episode}, step {step}"
        f"{why}: leave such episodes out with dovetail data merge {folder} --drop-invalid --out "
        "NEW."
    )
