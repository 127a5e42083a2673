"""Inserts sent to a server, with their arrays in shared memory.

The common ones, whose steps are all rows within episodes, are written in the table's storage
format: small leaves packed, and only the newest frame of each stack.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from dovetail.replay.host.form import RowForm, place, size_of
from dovetail.replay.host.incoming import IncomingSteps
from dovetail.replay.host.streams import is_plain
from dovetail.replay.service import channel as wire
from dovetail.replay.service.channel import ServerConnection
from dovetail.replay.service.messages import (
    PLAIN,
    PRIORITIES,
    InsertHead,
    arrays_of,
    head_of,
    insert_specs,
    insert_start,
)
from dovetail.replay.service.pipeline import Pipeline
from dovetail.replay.storage.records import RecordStart, check_of
from dovetail.replay.table import Transitions

Array = np.ndarray[Any, np.dtype[Any]]

KNOWN = 64
"""Number of insert forms for which buffers are cached."""


class InsertRoom(NamedTuple):
    """Buffers for inserts of one form."""

    head: bytes
    turns: list[list[Array]]
    """For each turn, the destinations of the arrays."""
    plain: list[list[Array]]
    """For a plain insert, everything sent in each turn; the first array must be cleared before."""
    start: RecordStart
    """The start of its log record."""
    size: int
    """Bytes of its arrays."""


class Inserts(Pipeline):
    """The inserts of one client to one server, with up to `window` in flight."""

    def __init__(self, channel: ServerConnection, form: RowForm, window: int) -> None:
        super().__init__(channel, window)
        self._form = form
        self._plainly = isinstance(form.table.items, Transitions)
        self._room = self._turn = 0
        self._memory: Any = None
        self._known: dict[InsertHead, InsertRoom] = {}
        self._shares = channel.shares
        self._summed: bool = channel.welcome["summed"]
        self._within = np.zeros(form.layout.envs, bool)
        """Whether the next step of each stream is known to be within an episode."""

    def insert(self, steps: IncomingSteps, first: int, last: int, timeout: float | None) -> None:
        """Sends an insert, after waiting for a free buffer."""
        head = head_of(steps, first, last)
        plain = self._plainly and head.length <= self._form.layout.chunk and is_plain(steps)
        if plain and (not self._form.stacks or self._within[first:last].all()):
            head = InsertHead(head.given & PRIORITIES | PLAIN, head.length, first, last, ())
            arrays = self._plain_arrays(steps)
        else:
            arrays = arrays_of(steps)
            self._within[first:last] = within(steps, self._within[first:last])
        prepared = self._known.get(head) or self._prepare(head)
        self.make_room()
        self._turn = (self._turn + 1) % self.window
        sent = prepared.plain[self._turn] if prepared.plain else []
        if sent:
            # The flag of final rows and the padding must be zero.
            sent[0].fill(0)
        for to, array in zip(prepared.turns[self._turn], arrays, strict=True):
            to[...] = array
        limit = math.nan if timeout is None else timeout
        check = check_of(prepared.start.check, sent) if self._summed and sent else 0
        at = self._turn * self._room
        fixed = wire.INSERT_HEAD.pack(at, self.failures, limit, check)
        rows = None if self._shares else memoryview(self._memory)[at : at + prepared.size]
        self.send(wire.INSERT + fixed + prepared.head, timeout, rows)

    def forget(self) -> None:
        """Discards what is known about the streams, because the table was replaced."""
        self._within[:] = False

    def _plain_arrays(self, steps: IncomingSteps) -> list[Array]:
        form = self._form
        found = [steps.leaves[at] for at in form.plain]
        for at, stack in zip(form.stacked, form.stacks, strict=True):
            x = steps.leaves[at]
            newest = stack.frame(x.reshape(-1, *x.shape[2:]), -1)
            found.append(newest.reshape(*x.shape[:2], *stack.shape))
        return found if steps.priorities is None else [*found, steps.priorities]

    def _prepare(self, head: InsertHead) -> InsertRoom:
        """Allocates buffers for inserts of that form."""
        specs = insert_specs(self._form, head)
        if size_of(specs) > self._room:
            self.flush()  # the server may still read the old memory
            self._known.clear()
            # Doubled, so that growing inserts rarely need new memory.
            self._room = max(size_of(specs), 2 * self._room)
            size = self._room * self.window
            descriptor = wire.create(size)
            self.channel.share(descriptor, size)
            self._memory = wire.attach(descriptor, size)
        if len(self._known) > KNOWN:
            self._known.clear()
        turns = [place(specs, self._memory, turn * self._room) for turn in range(self.window)]
        plain, start = list[list[Array]](), insert_start(head, turns[0])
        if head.given & PLAIN:
            plain, turns = turns, [self._views(arrays, head) for arrays in turns]
        prepared = self._known[head] = InsertRoom(
            head.packed(), turns, plain, start, size_of(specs)
        )
        return prepared

    def _views(self, arrays: list[Array], head: InsertHead) -> list[Array]:
        """The destination of each leaf of a plain insert [T, B, …]."""
        form, axes = self._form, (head.length, head.envs)
        block, *rest = (x.reshape(*axes, *x.shape[1:]) for x in arrays)
        views = form.packing.views(block)
        views |= dict(zip(form.packing.alone, rest, strict=False))
        kept = [views[at] for at in range(len(form.plain))]
        return [*kept, *rest[len(form.packing.alone) :]]


def within(steps: IncomingSteps, before: Array) -> Array:
    """Whether the next step of each stream [B] is within an episode, as far as known."""
    if steps.valid is None:
        return np.ones_like(before) if steps.ends is None else ~steps.ends[-1]
    known = before
    for time in range(len(steps.valid)):
        ends = False if steps.ends is None else steps.ends[time]
        known = np.where(steps.valid[time], ~np.asarray(ends), known)
    return known
