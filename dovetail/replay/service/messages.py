"""Inserts as bytes: a head of a few numbers, and arrays whose layout follows from it.

The same format goes to a server, with the arrays in shared memory, and into a log, where they
follow the head. Nothing is pickled.
"""

import struct
from typing import Any, NamedTuple

import numpy as np

from dovetail.replay.host.form import RowForm, Spec
from dovetail.replay.host.incoming import IncomingSteps, Plain
from dovetail.replay.host.packed import WORD
from dovetail.replay.storage.records import RecordStart, start_of

Array = np.ndarray[Any, np.dtype[Any]]

_HEAD = struct.Struct("<BHIII")
ENDS, VALID, PRIORITIES, PLAIN, BROKEN = 1, 2, 4, 8, 16
"""Flags of the optional arrays. `PLAIN`: every step is a row and no episode starts or ends, and the
arrays are in the table's storage format."""

INSERT, SAMPLE, UPDATE, OLD = b"i", b"s", b"u", b"o"
"""First byte of a log record's head. `OLD`: mapped rows that the next insert overwrites, and that
items may need if that insert is not finished."""

BOOLEAN, PRIORITY = np.dtype(bool), np.dtype(np.float32)


class InsertHead(NamedTuple):
    """Describes the arrays of an insert."""

    given: int
    length: int
    first: int
    last: int
    final: tuple[int, ...]
    """Positions of the leaves given in `final`."""

    @property
    def envs(self) -> int:
        """Number of environments of the insert."""
        return self.last - self.first

    def packed(self) -> bytes:
        """As bytes."""
        fixed = _HEAD.pack(self.given, len(self.final), self.length, self.first, self.last)
        return fixed + bytes(np.array(self.final, np.uint16).data) if self.final else fixed

    @staticmethod
    def unpacked(data: bytes) -> "InsertHead":
        """From bytes."""
        given, count, length, first, last = _HEAD.unpack_from(data)
        final = np.frombuffer(data, np.uint16, count, _HEAD.size).tolist() if count else ()
        return InsertHead(given, length, first, last, tuple(final))


def head_of(steps: IncomingSteps, first: int, last: int) -> InsertHead:
    """The head of an insert."""
    given = 0
    if steps.ends is not None:
        given |= ENDS
    if steps.valid is not None:
        given |= VALID
    if steps.priorities is not None:
        given |= PRIORITIES
    if steps.broken is not None:
        given |= BROKEN
    final = tuple(at for at, x in enumerate(steps.final or ()) if x is not None)
    return InsertHead(given, steps.leaves[0].shape[0], first, last, final)


def insert_start(head: InsertHead, arrays: list[Array]) -> RecordStart:
    """The start of an insert's log record."""
    return start_of(INSERT + head.packed(), arrays)


def plain_of(
    form: RowForm, head: InsertHead, arrays: list[Array], check: int | None = None
) -> Plain:
    """A plain insert from its arrays."""
    block, *rest = arrays
    alone, rest = rest[: len(form.packing.alone)], rest[len(form.packing.alone) :]
    frames, rest = rest[: len(form.stacks)], rest[len(form.stacks) :]
    return Plain(head.length, block, alone, frames, rest[0] if rest else None, check)


def arrays_of(steps: IncomingSteps) -> list[Array]:
    """The arrays of an insert, in order."""
    found = list(steps.leaves)
    beside = (steps.ends, steps.valid, steps.priorities, steps.broken)
    found += [x for x in beside if x is not None]
    return found + [x for x in steps.final or () if x is not None]


def insert_specs(form: RowForm, head: InsertHead) -> list[Spec]:
    """The shapes and dtypes of these arrays."""
    axes = (head.length, head.envs)
    if head.given & PLAIN:
        return plain_specs(form, head.length * head.envs, bool(head.given & PRIORITIES))
    found: list[Spec] = [((*axes, *leaf.shape), leaf.dtype) for leaf in form.leaves]
    for bit, dtype in ((ENDS, BOOLEAN), (VALID, BOOLEAN), (PRIORITIES, PRIORITY)):
        if head.given & bit:
            found.append((axes, dtype))
    if head.given & BROKEN:
        found.append((axes[1:], BOOLEAN))
    return found + [((*axes, *form.leaves[at].shape), form.leaves[at].dtype) for at in head.final]


def large_arrays(form: RowForm, head: InsertHead) -> list[bool]:
    """Which of them hold separately stored leaves, or frames."""
    alone = {form.plain[at] for at in form.packing.alone}
    large = [at in alone or at in form.stacked for at in range(len(form.leaves))]
    given = [bool(head.given & bit) for bit in (ENDS, VALID, PRIORITIES, BROKEN)]
    if head.given & PLAIN:
        own = [True] * (len(form.packing.alone) + len(form.stacks))
        return [False, *own, *[False] * bool(head.given & PRIORITIES)]
    return [*large, *[False] * sum(given), *(large[at] for at in head.final)]


def plain_specs(form: RowForm, count: int, priorities: bool) -> list[Spec]:
    """Shapes and dtypes for a plain insert of `count` rows."""
    alone = (form.kept[at] for at in form.packing.alone)
    return [
        ((count, form.packing.words), WORD),
        *(((count, *leaf.shape), leaf.dtype) for leaf in alone),
        *(((count, *stack.shape), stack.dtype) for stack in form.stacks),
        *([((count,), PRIORITY)] if priorities else []),
    ]


def steps_of(form: RowForm, head: InsertHead, arrays: list[Array]) -> IncomingSteps:
    """The steps of an insert, from its arrays."""
    leaves, rest = arrays[: len(form.leaves)], iter(arrays[len(form.leaves) :])
    ends, valid, priorities, broken = (
        next(rest) if head.given & bit else None for bit in (ENDS, VALID, PRIORITIES, BROKEN)
    )
    found: list[Array | None] = [None] * len(leaves)
    for at, array in zip(head.final, rest, strict=True):
        found[at] = array
    return IncomingSteps(leaves, ends, valid, found if head.final else None, priorities, broken)
