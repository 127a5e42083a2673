"""Buffers for samples, and trees of views of them.

They lie in private memory, or in memory shared with another process, where several tables may each
fill a part of one batch.
"""

from typing import Any

import numpy as np

from dovetail.errors import UserError
from dovetail.replay.host.form import RowForm, Spec, place, size_of
from dovetail.replay.host.packed import WORD
from dovetail.replay.sample import ItemKeys, Sample

Array = np.ndarray[Any, np.dtype[Any]]


def output_specs(form: RowForm, count: int) -> list[Spec]:
    """The arrays of a sample of `count` items."""
    layout, packing = form.layout, form.packing
    window = (layout.window, count)
    frames = frames_shape(form)
    return [
        ((*window, packing.words), WORD),
        *(((*window, *form.kept[at].shape), form.kept[at].dtype) for at in packing.alone),
        *(((count, *frames, *stack.shape), stack.dtype) for stack in form.stacks),
        ((count, layout.window), np.dtype(bool)),
        *[((count,), np.dtype(np.int64))] * 3,
        ((count,), np.dtype(np.float32)),
    ]


def copy_part(
    form: RowForm, count: int, memory: Any, part: tuple[int, int], received: bytes
) -> None:
    """Copies the items of a sample that came from one table to their positions among `count`."""
    first, last = part
    own = output_specs(form, last - first)
    if len(received) != size_of(own):
        raise UserError("A sample has another size than its items: use one version everywhere.")
    whole, came = place(output_specs(form, count), memory), place(own, bytearray(received))
    beside = 1 + len(form.packing.alone)
    for at, (to, array) in enumerate(zip(whole, came, strict=True)):
        if at < beside:  # rows have their items on the second axis
            to[:, first:last] = array
        else:
            to[first:last] = array


def frames_shape(form: RowForm) -> tuple[int, ...]:
    """The frames of an item: shared by consecutive rows, or separate for each row."""
    layout = form.layout
    if form.table.items.cut:
        return (layout.window + layout.stack - 1,)
    return (layout.window, layout.stack)


class Output:
    """Space for a sample of `count` items, or for `part` (from, to) of one."""

    def __init__(
        self,
        form: RowForm,
        structure: Any,
        count: int,
        buffer: Any = None,
        part: tuple[int, int] | None = None,
    ) -> None:
        whole = slice(*(part or (0, count)))
        block, *arrays = place(output_specs(form, count), buffer)
        self.block = block[:, whole]
        alone, arrays = arrays[: len(form.packing.alone)], arrays[len(form.packing.alone) :]
        self.alone = dict(
            zip(form.packing.alone, (array[:, whole] for array in alone), strict=True)
        )
        *frames, self.mask, slots, numbers, self.times, self.alike = (x[whole] for x in arrays)
        self.frames: list[Array] = frames
        self.keys = ItemKeys(slots, numbers)
        views = {**form.packing.views(self.block), **self.alone}
        # Stored [W, n], shown [n, W]: rows of one time step are read together.
        *plain, self.final = (np.swapaxes(views[at], 0, 1) for at in range(len(form.kept)))
        leaves: list[Any] = [None] * len(form.leaves)
        for at, leaf in zip(form.plain, plain, strict=True):
            leaves[at] = leaf
        cut = form.table.items.cut
        for at, stack, stored in zip(form.stacked, form.stacks, frames, strict=True):
            leaves[at] = stack.shared(stored) if cut else stack.whole(stored)
        self.tree: Any = leaves if structure is None else structure.unflatten(leaves)
        if cut:
            self.mask[:, 0] = True
        self._cut = cut
        self.masked = not cut or self.mask.shape[1] > 2
        """Whether the mask must be computed from the rows. That of a one-step transition is known,
        unless an episode was broken off after its first row (`Streams.broken`)."""
        self.places = np.zeros(self.block.shape[:2], np.int64)
        """Scratch space for the rows' positions."""

    def finish(self) -> None:
        """Computes the mask, once the rows have been read."""
        if not self._cut:
            np.equal(self.final, 0, out=self.mask)
        else:
            # Rows from the first final one on belong to no step of this item.
            passed = np.logical_or.accumulate(self.final[:, :-1], axis=1)
            np.logical_not(passed, out=self.mask[:, :-1])

    def note(self, sample: Sample) -> None:
        """Copies the items' keys, counts and probabilities."""
        self.keys.slot[...] = sample.keys.slot
        self.keys.number[...] = sample.keys.number
        self.times[...] = sample.times
        self.alike[...] = sample.probabilities
