"""A replay held by servers; the learner's state has only a reference to it.

`inserting`, `sampling` and `updating` are plain Python functions for the graph. Each opens its own
connections, so that every actor inserts directly into its shard and nothing is relayed. The same
draws give the same items as with a table in the learner.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.errors import UserError
from dovetail.replay.leaves import RowLeaf, leaves_of
from dovetail.replay.replay import DeviceReplay, Insertion, Replay, shard_of
from dovetail.replay.sample import ItemKeys, Sample
from dovetail.replay.service.address import Address
from dovetail.replay.service.client import ReplayClient
from dovetail.replay.table import Prioritized, Table

NOBODY = -1
"""The number of a nonexistent item."""


@dataclass(frozen=True)
class Served:
    """The servers of a replay."""

    shards: int
    place: str
    """Where they are, for display."""
    addresses: tuple[str, ...] = ()
    """One per server, as text; empty before they are started."""


@dataclass(frozen=True)
class ServedForm:
    """The table format of a replay's servers."""

    table: Table
    """Options of one shard."""
    streams: int
    """Number of environments of one shard."""
    leaves: tuple[RowLeaf, ...]
    tree: Any
    """The tree structure of a row."""

    @property
    def example(self) -> Any:
        """The shapes of a row."""
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves]
        return self.tree.unflatten(shapes)

    def shapes(self, draws: tuple[int, int], shards: int) -> Sample:
        """The shapes of a sample of draws [K, n]: the same as for a table in the learner."""

        def sampled(draws: jax.Array) -> Sample:
            size = self.table.capacity * shards
            whole = replace(self.table, capacity=size, max_bytes=None, compress=False)
            return DeviceReplay.empty(whole, self.example, self.streams * shards).sample(draws)[1]

        return jax.eval_shape(sampled, jax.ShapeDtypeStruct(draws, jnp.float32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RemoteReplay(Replay):
    """A reference to a replay held by servers."""

    turn: Any
    """A token that orders operations: its users run after earlier inserts and samples."""
    form: ServedForm = field(metadata={"static": True})
    served: Served = field(metadata={"static": True})

    @staticmethod
    def reached(table: Table, example: Any, num_envs: int, served: Served) -> "RemoteReplay":
        """A reference for rows like `example` of `num_envs` environments."""
        part, streams = shard_of(table, num_envs, served.shards)
        form = ServedForm(part, streams, tuple(leaves_of(example)), jax.tree.structure(example))
        return RemoteReplay(jnp.zeros((), jnp.int32), form, served)

    @property
    def table(self) -> Table:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Options of one shard."""
        return self.form.table

    @property
    def shards(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of servers."""
        return self.served.shards

    @property
    def place(self) -> str:
        """Where they are, for display."""
        return self.served.place

    def after(self, turn: Any) -> "RemoteReplay":
        """The reference after an operation that returned `turn`."""
        return replace(self, turn=turn)

    def told(self, envs: int) -> Any:
        """The result shape of an insert for `envs` environments."""
        return jax.ShapeDtypeStruct((1, envs), jnp.int32)

    def shapes(self, draws: jax.Array) -> tuple[Any, Sample]:
        """The result shapes of sampling draws [K, n]."""
        turn = jax.ShapeDtypeStruct((), jnp.int32)
        return turn, self.form.shapes((draws.shape[0], draws.shape[1]), self.shards)

    @property
    def inserting(self) -> "Way":
        """Takes an `Insertion`; returns ones [1, B] once it is acknowledged."""
        return Way("insert", self.form, self.served)

    @property
    def sampling(self) -> "Way":
        """Takes the turn and draws [K, n]; returns the turn and a sample."""
        return Way("sample", self.form, self.served)

    @property
    def updating(self) -> "Way":
        """Takes the turn, keys and priorities [K, n]; returns the turn."""
        return Way("update", self.form, self.served)


@dataclass(frozen=True)
class Way:
    """A plain Python function that calls the servers."""

    does: str
    form: ServedForm
    served: Served

    def open(self) -> "Inserting | RemoteSampling | Updating":
        """The function with its own open connections."""
        kinds = {"insert": Inserting, "sample": RemoteSampling, "update": Updating}
        return kinds[self.does](self.form, self.served)

    def __call__(self, *args: Any) -> Any:
        """Opens connections for this call only."""
        opened = self.open()
        try:
            return opened(*args)
        finally:
            opened.close()


class Clients:
    """Connections to the servers of a replay, opened on demand."""

    def __init__(self, form: ServedForm, served: Served) -> None:
        self._form, self._served = form, served
        self._clients: dict[int, ReplayClient] = {}

    def close(self) -> None:
        """Closes the connections."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            client.hang_up()

    def client(self, shard: int) -> ReplayClient:
        """The connection to a shard's server, checked to hold this replay's table."""
        if shard not in self._clients:
            address = Address.from_text(self._served.addresses[shard])
            client = ReplayClient(address, self._form.example)
            self._clients[shard] = client
            refuse_other_table(client, self._form, address.name)
        return self._clients[shard]


class Inserting(Clients):
    """Sends an actor's rows to the servers of their shards."""

    def __init__(self, form: ServedForm, served: Served) -> None:
        super().__init__(form, served)
        self._claimed: dict[int, tuple[int, np.ndarray]] = {}
        """By shard: the first of the streams we claimed, and whether an episode is open in each
        [B], which is assumed at first, as others may have left one."""

    def __call__(self, sent: Insertion) -> np.ndarray:
        """Returns once everything is acknowledged."""
        numbers = np.asarray(sent.streams[0])
        first, streams = int(numbers[0]), self._form.streams
        assert numbers[-1] - first == numbers.size - 1, "an actor's environments are a range"
        for shard in range(first // streams, int(numbers[-1]) // streams + 1):
            low, high = (
                max(first, shard * streams),
                min(first + len(numbers), (shard + 1) * streams),
            )
            here = slice(low - first, high - first)
            self._insert(shard, low % streams, jax.tree.map(lambda x, s=here: x[:, s], sent))
        for client in self._clients.values():
            client.flush()
        return np.ones((1, numbers.size), np.int32)

    def _insert(self, shard: int, wanted: int, sent: Insertion) -> None:
        """Inserts one shard's part."""
        client, count = self.client(shard), sent.streams.shape[1]
        if shard not in self._claimed:
            claimed = client.claim(count, wanted)
            self._claimed[shard] = claimed, np.ones(count, bool)
        begin, was_open = self._claimed[shard]
        ends, broken = sent.terminated | sent.truncated, sent.first[0] & was_open
        client.insert(
            sent.rows,
            ends=ends,
            valid=sent.valid,
            final=sent.final,
            priorities=sent.priorities,
            envs=(begin, begin + count),
            broken=broken if broken.any() else None,
        )
        for valid, ended in zip(sent.valid, ends, strict=True):
            was_open = np.where(valid, ~ended, was_open)
        self._claimed[shard] = begin, was_open

    def close(self) -> None:
        """Closes the connections."""
        self._claimed.clear()
        super().close()


class RemoteSampling(Clients):
    """Requests each server's part of every batch."""

    def __call__(self, turn: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, Sample]:
        """A sample; undefined and of size 0 while a table is empty."""
        shards = self._served.shards
        parts = np.split(draws, shards, axis=1)
        for shard, part in enumerate(parts):
            self.client(shard).ask(part.T.ravel() if self._stratified else part.ravel(), now=True)
        found = [self._shaped(self.client(i).take(), part) for i, part in enumerate(parts)]
        if shards == 1:
            return turn, found[0]
        return turn, jax.tree.map(lambda *x: np.concatenate(x, axis=1), *found)

    @cached_property
    def _stratified(self) -> bool:
        """Whether an item's position among the draws is its stratum; batches must cover all
        strata."""
        return isinstance(self._form.table.sampler, Prioritized)

    def _shaped(self, found: Sample, draws: np.ndarray) -> Sample:
        """One server's part of the batches [K, n, …]."""
        shards, (batches, each) = self._served.shards, draws.shape
        if int(found.size) == 0:
            empty = jax.tree.map(
                lambda s: np.zeros(s.shape, s.dtype), self._form.shapes((batches, each), shards)
            )
            return empty._replace(keys=ItemKeys(empty.keys.slot, empty.keys.number + NOBODY))

        def shape(x: np.ndarray) -> np.ndarray:
            if self._stratified:
                return x.reshape(each, batches, *x.shape[1:]).swapaxes(0, 1)
            return x.reshape(batches, each, *x.shape[1:])

        return Sample(
            rows=jax.tree.map(shape, found.rows),
            mask=shape(found.mask),
            keys=ItemKeys(*(shape(x).astype(np.int32) for x in found.keys)),
            # Every shard gives an equal part of the batch.
            probabilities=shape(found.probabilities) / np.float32(shards),
            size=np.full(draws.shape, int(found.size) * shards, np.int32),
            times=shape(found.times).astype(np.int32),
        )


class Updating(Clients):
    """Sends priorities to the servers of their items."""

    def __call__(self, turn: np.ndarray, keys: ItemKeys, priorities: np.ndarray) -> np.ndarray:
        """Returns once everything is acknowledged, so that the next sample uses them."""
        shards = self._served.shards
        split = [np.split(x, shards, axis=1) for x in (*keys, priorities)]
        for shard, (slot, number, given) in enumerate(zip(*split, strict=True)):
            # As on the device, invalid priorities are ignored.
            good = (number != NOBODY) & (given >= 0) & (given < np.inf)
            if good.any():
                client = self.client(shard)
                client.update_priorities(ItemKeys(slot[good], number[good]), given[good])
        for client in self._clients.values():
            client.flush()
        return turn


def refuse_other_table(client: ReplayClient, form: ServedForm, name: str) -> None:
    """Raises if a server's table belongs to a different algorithm or has too few environments; its
    capacity may differ."""
    theirs, ours, room = client.form.table, form.table, client.form.layout.envs
    for option in ("items", "sampler", "remover", "max_times_sampled", "history"):
        if getattr(theirs, option) != getattr(ours, option):
            raise UserError(
                f"The replay server ({name}) keeps another table than this training, with {option} "
                f"{getattr(theirs, option)} instead of {getattr(ours, option)}: serve one for the "
                "same algorithm with the same options."
            )
    if room < form.streams:
        raise UserError(
            f"The replay server ({name}) has room for {room} environments, but this training has "
            f"{form.streams}: serve one for more (dovetail replay --num-envs), or use fewer "
            "(--num-envs)."
        )
