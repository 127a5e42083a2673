"""Checks inserted data against a table's rows before it reaches the table.

Tables and clients of remote tables both use it, so errors are raised where the mistake was made.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dovetail.errors import UserError
from dovetail.replay.leaves import RowLeaf, check_leaves, final_positions

Array = np.ndarray[Any, np.dtype[Any]]


FLOAT = np.dtype(np.float32)
INFINITE = np.uint32(0x7F800000)
"""The bit pattern of float32 infinity."""


class IncomingSteps(NamedTuple):
    """Steps [T, B] of some environments, leaf by leaf."""

    leaves: list[Array]
    ends: Array | None
    valid: Array | None
    final: list[Array | None] | None
    priorities: Array | None
    broken: Array | None = None
    """Whether an episode starts with the first step although the last one did not end [B]."""

    def part(self, start: int, end: int) -> "IncomingSteps":
        """The steps from time `start` to `end`, without `broken`, which is for the first only."""
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
        """The steps of environments `start` … `end` - 1."""
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
        """Number of valid steps."""
        if self.valid is not None:
            return int(np.count_nonzero(self.valid))
        length, envs = self.leaves[0].shape[:2]
        return length * envs


class Plain(NamedTuple):
    """Steps that are all rows within episodes, in storage format; n = T × B, time-major."""

    length: int
    block: Array
    """Small leaves, packed [n, words]."""
    alone: list[Array]
    """Large leaves [n, …]."""
    frames: list[Array]
    """Newest frame of each leaf with a history [n, …]."""
    priorities: Array | None
    """[n]."""
    check: int | None = None
    """Check sum of their log record, if the sender computed it."""


class Incoming:
    """Checks inserts for `num_envs` environments against a table's rows."""

    def __init__(self, leaves: Sequence[RowLeaf], structure: Any, num_envs: int) -> None:
        self.leaves, self.structure, self._num_envs = list(leaves), structure, num_envs
        self._wanted: tuple[tuple[int, int], list[tuple[Any, tuple[int, ...]]]] = ((0, 0), [])
        """Cache: the dtypes and shapes of the leaves for the last insert's shape."""
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
        """The number of steps; raises if the rows do not match the table's."""
        if not 0 <= first < last <= self._num_envs:
            raise UserError(
                f"Rows were inserted for environments {first} to {last}, but the table has "
                f"{self._num_envs}: give a range of these."
            )
        length = leaves[0].shape[0] if leaves and getattr(leaves[0], "ndim", 0) > 1 else 0
        fits = structure == self.structure and length > 0
        if fits:
            axes = (length, last - first)
            # Inserts usually repeat their shape: build the expected shapes once.
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
        """The final rows, leaf by leaf; None for leaves that were not given."""
        leaves, structure = self._flatten(final)
        if self._finals is None or self._finals[0] != structure:
            check_leaves(self.leaves, final, shape, "final")
            # Checked once: later inserts have the same structure as a rule.
            self._finals = (structure, final_positions(self.leaves, final))
        found: list[Array | None] = [None] * len(self.leaves)
        for at, array in zip(self._finals[1], leaves, strict=True):
            leaf = self.leaves[at]
            if array.dtype != leaf.dtype or array.shape != shape + leaf.shape:
                check_leaves(self.leaves, final, shape, "final")
            found[at] = array
        return found


def highest_of(priorities: Array) -> float:
    """The highest priority, as float32; raises if one is not finite or is negative."""
    if not priorities.size:
        return 0.0
    flat = priorities.reshape(-1)
    if flat.dtype == FLOAT:  # nonnegative finite floats sort like their bit patterns
        bits = np.maximum.reduce(flat.view(np.uint32))
        # Negative numbers and NaN have larger bits than infinity, so one comparison finds them too.
        if bits < INFINITE:
            return float(bits.view(FLOAT))
    most = float(np.maximum.reduce(flat))
    if not (float(np.minimum.reduce(flat)) >= 0 and most < float("inf")):
        wrong = priorities[~((priorities >= 0) & (priorities < float("inf")))].ravel()[0]
        raise UserError(f"A priority is {wrong}: give finite numbers from 0 upwards.")
    return float(np.float32(most))


def refuse_shape(name: str, array: Array, shape: tuple[int, ...]) -> None:
    """Raises because an argument of `insert` has a different shape than the steps."""
    raise UserError(
        f"What was inserted as {name} has shape {list(array.shape)}, but the rows are "
        f"{list(shape)} steps of environments: give one for each."
    )
