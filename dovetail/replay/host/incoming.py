"""What is inserted, looked at before it reaches a table: as a table's rows, or refused.

A table does so, and so does the client of one that is kept elsewhere: what is wrong is said where
it was done.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dovetail.errors import UserError
from dovetail.replay.leaves import RowLeaf, check_leaves, final_positions

Array = np.ndarray[Any, np.dtype[Any]]


FLOAT = np.dtype(np.float32)
INFINITE = np.uint32(0x7F800000)
"""The bits of infinity in 32."""


class IncomingSteps(NamedTuple):
    """Some steps [T, B] of some environments, leaf by leaf."""

    leaves: list[Array]
    ends: Array | None
    valid: Array | None
    final: list[Array | None] | None
    priorities: Array | None
    broken: Array | None = None
    """Whether an episode begins with the first step although the last did not end [B]."""

    def part(self, start: int, end: int) -> "IncomingSteps":
        """Those from one time to another; whether they begin episodes is not said again."""
        return IncomingSteps(
            [x[start:end] for x in self.leaves],
            None if self.ends is None else self.ends[start:end],
            None if self.valid is None else self.valid[start:end],
            None
            if self.final is None
            else [None if x is None else x[start:end] for x in self.final],
            None if self.priorities is None else self.priorities[start:end],
        )

    def envs(self, start: int, end: int) -> "IncomingSteps":
        """Those of some of the environments."""
        return IncomingSteps(
            [x[:, start:end] for x in self.leaves],
            None if self.ends is None else self.ends[:, start:end],
            None if self.valid is None else self.valid[:, start:end],
            None
            if self.final is None
            else [None if x is None else x[:, start:end] for x in self.final],
            None if self.priorities is None else self.priorities[:, start:end],
            None if self.broken is None else self.broken[start:end],
        )

    @property
    def valid_count(self) -> int:
        """How many are valid."""
        if self.valid is not None:
            return int(np.count_nonzero(self.valid))
        length, envs = self.leaves[0].shape[:2]
        return length * envs


class Plain(NamedTuple):
    """Steps that are all rows within episodes, as a table stores them; n = T × B, in that order."""

    length: int
    block: Array
    """Their small leaves, packed [n, words]."""
    alone: list[Array]
    """Their large leaves [n, …]."""
    frames: list[Array]
    """Of each leaf with a history the newest frames [n, …]."""
    priorities: Array | None
    """[n]."""
    check: int | None = None
    """The check sum of a log's record of them, if whoever made them told it."""


class Incoming:
    """Checks what is inserted for `num_envs` environments against a table's rows."""

    def __init__(self, leaves: Sequence[RowLeaf], structure: Any, num_envs: int) -> None:
        self.leaves, self.structure, self._num_envs = list(leaves), structure, num_envs
        self._wanted: tuple[tuple[int, int], list[tuple[Any, tuple[int, ...]]]] = ((0, 0), [])
        """Of the last shape of an insert, the types and shapes of its leaves."""
        self._finals: tuple[Any, list[int]] | None = None
        if structure is not None:
            from jax.tree import flatten

            self._flatten = flatten

    def steps(
        self,
        rows: Any,
        ends: Array | None,
        valid: Array | None,
        final: Any,
        priorities: Array | None,
        envs: tuple[int, int] | None,
        broken: Array | None = None,
    ) -> tuple[IncomingSteps, int, int]:
        """The steps of an insert, and the range of their environments."""
        first, last = (0, self._num_envs) if envs is None else envs
        leaves, structure = self._flatten(rows)
        shape = (self._length(rows, leaves, structure, first, last), last - first)
        finals = None if final is None else self._final_leaves(final, shape)
        if ends is not None and ends.shape != shape:
            refuse_shape("ends", ends, shape)
        if valid is not None and valid.shape != shape:
            refuse_shape("valid", valid, shape)
        if priorities is not None:
            if priorities.shape != shape:
                refuse_shape("priorities", priorities, shape)
            highest_of(priorities)
            priorities = np.asarray(priorities, np.float32)
        if broken is not None and broken.shape != shape[1:]:
            refuse_shape("broken", broken, shape[1:])
        return IncomingSteps(leaves, ends, valid, finals, priorities, broken), first, last

    def _length(
        self, rows: Any, leaves: Sequence[Array], structure: Any, first: int, last: int
    ) -> int:
        """The number of steps, of rows that are as the table's."""
        if not 0 <= first < last <= self._num_envs:
            raise UserError(
                f"Rows were inserted for environments {first} to {last}, but the table has "
                f"{self._num_envs}: give a range of these."
            )
        length = leaves[0].shape[0] if leaves and getattr(leaves[0], "ndim", 0) > 1 else 0
        fits = structure == self.structure and length > 0
        if fits:
            axes = (length, last - first)
            if self._wanted[0] != axes:
                self._wanted = (axes, [(leaf.dtype, axes + leaf.shape) for leaf in self.leaves])
            for (dtype, shape), array in zip(self._wanted[1], leaves, strict=True):
                if array.shape != shape or (array.dtype is not dtype and array.dtype != dtype):
                    fits = False
        if not fits:
            check_leaves(self.leaves, rows, (max(length, 1), last - first), "rows")
            raise UserError(
                "What was inserted has another structure than the table's rows: "
                "insert the type of row that the table was made with."
            )
        return length

    def _final_leaves(self, final: Any, shape: tuple[int, int]) -> list[Array | None]:
        """What was seen after each step, leaf by leaf of a row; None for what was not given."""
        leaves, structure = self._flatten(final)
        if self._finals is None or self._finals[0] != structure:
            check_leaves(self.leaves, final, shape, "final")
            self._finals = (structure, final_positions(self.leaves, final))
        found: list[Array | None] = [None] * len(self.leaves)
        for at, array in zip(self._finals[1], leaves, strict=True):
            leaf = self.leaves[at]
            if array.dtype != leaf.dtype or array.shape != shape + leaf.shape:
                check_leaves(self.leaves, final, shape, "final")
            found[at] = array
        return found


def highest_of(priorities: Array) -> float:
    """The highest of priorities, as it is kept in 32 bits."""
    if not priorities.size:
        return 0.0
    flat = priorities.reshape(-1)
    if flat.dtype == FLOAT:  # finite ones from 0 upwards are in the order of their bits
        bits = np.maximum.reduce(flat.view(np.uint32))
        if bits < INFINITE:
            return float(bits.view(FLOAT))
    most = float(np.maximum.reduce(flat))
    if not (float(np.minimum.reduce(flat)) >= 0 and most < float("inf")):
        wrong = priorities[~((priorities >= 0) & (priorities < float("inf")))].ravel()[0]
        raise UserError(f"A priority is {wrong}: give finite numbers from 0 upwards.")
    return float(np.float32(most))


def refuse_shape(name: str, array: Array, shape: tuple[int, ...]) -> None:
    """Says that an argument of `insert` has another shape than the steps."""
    raise UserError(
        f"What was inserted as {name} has shape {list(array.shape)}, but the rows are "
        f"{list(shape)} steps of environments: give one for each."
    )
