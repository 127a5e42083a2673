"""Clients of replay tables in other processes.

A client of several servers sees them as one table: each holds the streams of some environments,
every sample takes equal parts from all of them, and priorities go back to the items' servers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from dovetail.errors import UserError
from dovetail.replay.host.form import RowForm, place, size_of
from dovetail.replay.host.incoming import Incoming, IncomingSteps, highest_of
from dovetail.replay.leaves import RowLeaf, leaves_of, structure_of
from dovetail.replay.sample import ItemKeys, Sample
from dovetail.replay.service import channel as wire
from dovetail.replay.service.address import Address
from dovetail.replay.service.channel import ServerConnection
from dovetail.replay.service.inserts import Inserts
from dovetail.replay.service.messages import PRIORITY
from dovetail.replay.service.options import read
from dovetail.replay.service.pipeline import Pipeline
from dovetail.replay.service.samples import SampleStream
from dovetail.replay.table import Highest, Lowest, Prioritized

Array = np.ndarray[Any, np.dtype[Any]]


class Server:
    """A client's view of one server: its table, and the connections to it."""

    def __init__(
        self, address: Address, timeout: float | None, window: int, why: Callable[[], str] | None
    ) -> None:
        self.address, self._window, self._why = address, window, why
        self._timeout = 60.0 if timeout is None else timeout
        self.control = Pipeline(self.open("control"), window)
        said = self.control.channel.welcome
        # The server's own limit, unless the caller has one.
        self._timeout = said["timeout"] if timeout is None else timeout
        leaves = [
            RowLeaf(path, tuple(shape), np.dtype(dtype)) for path, shape, dtype in said["leaves"]
        ]
        self.form = RowForm(read(said["table"]), leaves, said["envs"])
        self.epoch: int = said["epoch"]
        self.inserts: Inserts | None = None
        # Inserts and priorities go by two connections, and the server may serve either first. Where
        # priorities decide which item an insert removes, each waits for the other.
        self._in_order = isinstance(self.form.table.remover, Prioritized | Highest | Lowest)

    def open(self, what: str, **more: Any) -> ServerConnection:
        """Opens a new connection."""
        return ServerConnection(self.address, {"channel": what, **more}, self._timeout, self._why)

    def claim(self, count: int, wanted: int) -> int:
        """Reserves `count` streams for this client and returns the first."""
        channel = self.open("insert", claim=[count, wanted])
        self.inserts = Inserts(channel, self.form, self._window)
        return channel.welcome["first"]

    def insert(self, steps: IncomingSteps, first: int, last: int, timeout: float | None) -> None:
        """Sends an insert without waiting for its acknowledgment."""
        if self.inserts is None:
            self.inserts = Inserts(self.open("insert"), self.form, self._window)
        if self._in_order:
            self.control.flush()
        self.inserts.insert(steps, first, last, timeout)

    def update(self, message: bytes) -> None:
        """Sends new priorities."""
        if self._in_order and self.inserts is not None:
            self.inserts.flush()
        self.control.send(message)

    def flush(self) -> None:
        """Waits for all outstanding answers."""
        if self.inserts is not None:
            self.inserts.flush()
        self.control.flush()

    def close(self) -> None:
        """Closes the connections."""
        self.control.channel.close()
        if self.inserts is not None:
            self.inserts.channel.close()


class ReplayClient:
    """Inserts into and samples from the table of a server, or of several as one.

    Inserts and priority updates are sent without waiting, up to `window` of them. Each is
    acknowledged, and a failure is raised by a later call, at the latest by `flush`. `sample` and
    `size` wait for this client's own inserts. A sample is valid until `buffers` further ones have
    been taken. A client belongs to one thread; any number of clients may be connected.
    """

    def __init__(
        self,
        addresses: Address | Sequence[Address],
        example: Any,
        window: int = 8,
        buffers: int = 2,
        timeout: float | None = None,
        why: Callable[[int], str] | None = None,
    ) -> None:
        """`example`: a row like those of the table; `why(i)`: what became of server i, for
        errors."""
        found = [addresses] if isinstance(addresses, Address) else list(addresses)
        self._servers = [
            Server(address, timeout, window, None if why is None else partial(why, at))
            for at, address in enumerate(found)
        ]
        self._structure, self._buffers = structure_of(example), buffers
        self.form = self._servers[0].form
        # Raises now, instead of at the first insert.
        self._check(leaves_of(example))
        sizes = [server.form.layout.envs for server in self._servers]
        self._firsts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        self._incoming = Incoming(self.form.leaves, self._structure, self._firsts[-1])
        self._samples: SampleStream | None = None

    @property
    def epoch(self) -> int:
        """Changes when a server has lost acknowledged data."""
        return sum(server.epoch for server in self._servers)

    @property
    def size(self) -> int:
        """Number of items that can be sampled."""
        return self.counts()["size"]

    @property
    def acknowledged(self) -> int:
        """Number of inserts known to be in the table, where a durable one keeps them. With several
        servers, each counts its part of an insert."""
        return sum(s.inserts.acknowledged for s in self._servers if s.inserts is not None)

    def counts(self) -> dict[str, int]:
        """Number of items that can be sampled (size), ever inserted, and ever sampled."""
        self.flush()
        found = [json.loads(s.control.ask(wire.COUNTS, "counts")) for s in self._servers]
        return {name: sum(counts[name] for counts in found) for name in found[0]}

    def insert(
        self,
        rows: Any,
        ends: Any = None,
        valid: Any = None,
        final: Any = None,
        priorities: Any = None,
        envs: tuple[int, int] | None = None,
        broken: Any = None,
        timeout: float | None = None,
    ) -> None:
        """`HostTable.insert`, once the rate limiter allows it."""
        steps, first, last = self._incoming.steps(
            rows, ends, valid, final, priorities, envs, broken
        )
        if len(self._servers) == 1:
            self._servers[0].insert(steps, first, last, timeout)
            return
        for server, begin, end in zip(self._servers, self._firsts, self._firsts[1:], strict=False):
            low, high = max(first, begin), min(last, end)
            if low < high:
                part = steps.envs(low - first, high - first)
                server.insert(part, low - begin, high - begin, timeout)

    def flush(self) -> None:
        """Waits until everything sent is acknowledged."""
        for server in self._servers:
            server.flush()

    def claim(self, count: int, wanted: int = 0) -> int:
        """Reserves `count` environments for this client until it disconnects, and returns the
        first: `wanted` if that range is free. Only with one server, and before any insert."""
        [server] = self._servers
        return server.claim(count, wanted)

    def sample(self, draws: Any, timeout: float | None = None) -> Sample:
        """`HostTable.sample`, once there are items and the rate limiter allows it; of several
        servers, each provides its share of the items."""
        self.ask(draws, timeout)
        return self.take()

    def ask(self, draws: Any, timeout: float | None = None, now: bool = False) -> None:
        """Requests a sample, to be received by `take`. With `now`, an empty table answers at once
        with size 0 and otherwise undefined contents."""
        self.flush()
        draws = np.asarray(draws)
        if self._samples is None or self._samples.count != draws.size:
            if self._samples is not None:
                self._samples.close()
            self._samples = self._open_samples(draws.size, 0)
        self._samples.ask(draws, timeout, now)

    def take(self) -> Sample:
        """Waits for the requested sample."""
        assert self._samples is not None
        return self._samples.take()

    def samples(
        self, count: int, seed: int = 0, ahead: int = 2, timeout: float | None = None
    ) -> SampleStream:
        """An endless stream of samples of `count` items, with `ahead` requested in advance."""
        found = self._open_samples(count, ahead)
        found.run(np.random.default_rng(seed), timeout)
        return found

    def _open_samples(self, count: int, ahead: int) -> SampleStream:
        channels = [server.open("sample") for server in self._servers]
        return SampleStream(self.form, self._structure, channels, count, self._buffers, ahead)

    def update_priorities(self, keys: ItemKeys, priorities: Any) -> None:
        """`HostTable.update_priorities`; a failure is raised by a later call."""
        priorities = np.asarray(priorities)
        # Raises here, where the caller is, and not with a later message.
        highest_of(priorities)
        slots, numbers = np.asarray(keys.slot, np.int64), np.asarray(keys.number, np.int64)
        count = len(self._servers)
        for at, server in enumerate(self._servers):
            given = [slots, numbers, priorities]
            if count > 1:
                # Slots of several servers are interleaved, see `SampleStream._join`.
                here = slots % count == at
                given = [slots[here] // count, numbers[here], priorities[here]]
            packed = (np.asarray(given[2], PRIORITY).tobytes(),)
            head = wire.UPDATE + wire.UPDATE_HEAD.pack(given[0].size)
            parts = (head, given[0].tobytes(), given[1].tobytes(), *packed)
            if given[0].size:
                server.update(b"".join(parts))

    def state(self) -> dict[str, Array]:
        """A copy of the tables' contents with the limiters' counts: for a checkpoint."""
        self.flush()
        found: dict[str, Array] = {}
        for at, server in enumerate(self._servers):
            said = json.loads(server.control.ask(wire.STATE, "the state"))
            memory = server.control.channel.receive_memory(said["size"])
            specs = [(tuple(shape), np.dtype(dtype)) for _, shape, dtype in said["arrays"]]
            names = [f"{at}/{name}" for name, _, _ in said["arrays"]]
            found |= dict(zip(names, place(specs, memory), strict=True))
        return found

    def load(self, state: Mapping[str, Array]) -> None:
        """Restores the tables from the result of `state`."""
        self.flush()
        for at, server in enumerate(self._servers):
            start = f"{at}/"
            arrays = {n.removeprefix(start): x for n, x in state.items() if n.startswith(start)}
            specs = [(x.shape, x.dtype) for x in arrays.values()]
            size = max(size_of(specs), 1)
            channel, descriptor = server.control.channel, wire.create(size)
            channel.share(descriptor, size)
            memory = wire.attach(descriptor, size)
            for to, array in zip(place(specs, memory), arrays.values(), strict=True):
                to[...] = array
            said = [[name, list(x.shape), x.dtype.str] for name, x in arrays.items()]
            channel.send(wire.LOAD + json.dumps(said).encode())
            for piece in [] if channel.shares else wire.pieces(memory, size):
                channel.send(b"", piece)
            channel.receive("loading")
            if server.inserts is not None:
                server.inserts.forget()

    def close(self) -> None:
        """Waits until everything sent is acknowledged, and disconnects."""
        try:
            self.flush()
        finally:
            self.hang_up()

    def hang_up(self) -> None:
        """Disconnects without waiting; safe to call twice."""
        if self._samples is not None:
            self._samples.close()
        for server in self._servers:
            server.close()

    def __enter__(self) -> "ReplayClient":
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.hang_up()  # must not hide the exception being raised

    def _check(self, leaves: Sequence[RowLeaf]) -> None:
        """Raises if the example is not a row of the tables, or if the tables differ."""
        for server in self._servers:
            theirs = server.form.leaves
            if list(leaves) != theirs:
                raise UserError(
                    f"The client's rows are {_described(leaves)}, but those of the replay server "
                    f"{_described(theirs)}: give the example that the server was made with."
                )
            mine, other = self.form.table, server.form.table
            if (mine.items, mine.history, mine.sampler) != (
                other.items,
                other.history,
                other.sampler,
            ):
                raise UserError(
                    f"The replay servers' tables differ, {mine} and {other}: give servers that "
                    "were made with the same options."
                )


def _described(leaves: Sequence[RowLeaf]) -> str:
    return ", ".join(f"{leaf.path} {leaf}" for leaf in leaves)
