"""Samples from servers in shared memory, prefetched."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dovetail.errors import UserError
from dovetail.replay.host.form import RowForm, size_of
from dovetail.replay.host.output import Output, copy_part, output_specs
from dovetail.replay.sample import ItemKeys, Sample
from dovetail.replay.service import channel as wire
from dovetail.replay.service.channel import ServerConnection

Array = np.ndarray[Any, np.dtype[Any]]


class SampleStream:
    """An endless iterator over batches of `count` items, each server filling its part.

    Up to `ahead` batches are requested before they are taken, so a batch reflects the table at the
    time of its request. A batch is valid until `buffers` further ones have been taken.
    """

    def __init__(
        self,
        form: RowForm,
        structure: Any,
        channels: Sequence[ServerConnection],
        count: int,
        buffers: int,
        ahead: int,
    ) -> None:
        if count < len(channels):
            raise UserError(
                f"A sample of {count} items was asked of {len(channels)} replay servers: ask for "
                "at least one of each."
            )
        self.count = count
        self._channels, self._ahead = list(channels), ahead
        # Parts differ by at most one item.
        bounds = [count * at // len(channels) for at in range(len(channels) + 1)]
        self._parts = list(pairwise(bounds))
        # Batches in use, the one being taken, and those in flight each need a buffer.
        turns = buffers + 1 + ahead
        room = size_of(output_specs(form, count))
        descriptor = wire.create(room * turns)
        for channel in channels:
            channel.share(descriptor, room * turns)
        self._form = form
        self._memory = memory = memoryview(wire.attach(descriptor, room * turns))
        self._offsets = [turn * room for turn in range(turns)]
        self._outputs = [Output(form, structure, count, memory[at:]) for at in self._offsets]
        self._asked = self._taken = 0
        self._random: np.random.Generator | None = None
        self._limit: float | None = None

    def run(self, random: np.random.Generator, timeout: float | None) -> None:
        """Requests the first batches; taking one requests the next."""
        self._random, self._limit = random, timeout
        for _ in range(self._ahead + 1):
            self._ask_next()

    def ask(self, draws: Array, timeout: float | None, now: bool = False) -> None:
        """Requests each server's part of a batch; with `now`, an empty one answers at once."""
        kind = np.dtype(np.float32 if draws.dtype == np.float32 else np.float64)
        packed = np.ascontiguousarray(draws, kind).tobytes()
        limit = math.nan if timeout is None else timeout
        offset = self._offsets[self._turn(self._asked)]
        for channel, (first, last) in zip(self._channels, self._parts, strict=True):
            head = wire.SAMPLE_HEAD.pack(
                offset, self.count, first, last, limit, kind.str[1:].encode(), now
            )
            size = kind.itemsize
            channel.send(wire.SAMPLE + head + packed[first * size : last * size])
        self._limit = timeout
        self._asked += 1

    def take(self) -> Sample:
        """The oldest requested batch."""
        sizes: list[int] = []
        failure: UserError | None = None
        turn = self._turn(self._taken)
        for channel, part in zip(self._channels, self._parts, strict=True):
            try:
                answer = channel.receive(f"a sample of {self.count} items", self._limit)
                sizes.append(wire.SIZE.unpack_from(answer)[0])
                if len(answer) > wire.SIZE.size:
                    place = self._memory[self._offsets[turn] :]
                    copy_part(self._form, self.count, place, part, answer[wire.SIZE.size :])
            except UserError as error:
                # Receive every server's answer before raising, or later answers would be mixed up.
                failure = failure or error
        output = self._outputs[turn]
        self._taken += 1
        if failure is not None:
            raise failure
        # Copies: `_join` changes them in place, and they may outlive the buffer.
        keys = ItemKeys(output.keys.slot.copy(), output.keys.number.copy())
        probabilities, size = output.alike.copy(), np.int32(sum(sizes))
        if len(self._channels) > 1:
            self._join(keys, probabilities)
        return Sample(output.tree, output.mask, keys, probabilities, size, output.times.copy())

    def _join(self, keys: ItemKeys, probabilities: Array) -> None:
        """Converts keys and probabilities of single servers to the whole table's, in place."""
        for at, (first, last) in enumerate(self._parts):
            # The server's number becomes part of the key, so that priorities find their way back.
            keys.slot[first:last] *= len(self._channels)
            keys.slot[first:last] += at
            # The probability of the server, times that of the item on it.
            probabilities[first:last] *= (last - first) / self.count

    def _turn(self, number: int) -> int:
        return number % len(self._outputs)

    def _ask_next(self) -> None:
        assert self._random is not None
        self.ask(self._random.random(self.count, np.float32), self._limit)

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        if self._asked - self._taken <= self._ahead:
            self._ask_next()
        return self.take()

    def __enter__(self) -> "SampleStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        for channel in self._channels:
            channel.close()
