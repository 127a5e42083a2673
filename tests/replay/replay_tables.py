"""The tables under one face, so that one test holds all of them to the model."""

from typing import Any, ClassVar, Protocol

import jax
import numpy as np

from dovetail.replay import ReplayClient, ReplayServer, ReplayShards
from dovetail.replay.device import table as device
from dovetail.replay.host.table import HostTable
from dovetail.replay.leaves import leaves_of
from dovetail.replay.sample import ItemKeys, Sample
from dovetail.replay.service.service import ReplayService
from dovetail.replay.table import Table, TableSizes

Array = np.ndarray[Any, Any]


class AnyTable(Protocol):
    """What every table does."""

    def insert(
        self,
        rows: Any,
        ends: Any = None,
        valid: Any = None,
        final: Any = None,
        priorities: Any = None,
        envs: tuple[int, int] | None = None,
    ) -> None: ...
    def sample(self, draws: Array) -> Sample: ...
    def update_priorities(self, keys: ItemKeys, priorities: Array) -> None: ...
    @property
    def size(self) -> int: ...
    @property
    def layout(self) -> TableSizes: ...


class OnDevice:
    """The pure functions, compiled, with their state."""

    def __init__(self, table: Table, example: Any, num_envs: int) -> None:
        self.table = table
        self.state = device.init(table, example, num_envs)
        self.layout = device._view(table, self.state).layout
        self._insert, self._sample, self._update = compiled(table)

    def insert(
        self,
        rows: Any,
        ends: Any = None,
        valid: Any = None,
        final: Any = None,
        priorities: Any = None,
        envs: tuple[int, int] | None = None,
    ) -> None:
        streams = None if envs is None else np.arange(*envs, dtype=np.int32)
        self.state = self._insert(self.state, rows, ends, valid, final, priorities, streams)

    def sample(self, draws: Array) -> Sample:
        self.state, sample = self._sample(self.state, draws.astype(np.float32))
        return jax.tree.map(np.asarray, sample)

    def update_priorities(self, keys: ItemKeys, priorities: Array) -> None:
        self.state = self._update(self.state, keys, priorities)

    @property
    def size(self) -> int:
        return int(device.size(self.table, self.state))


_compiled: dict[Table, Any] = {}


def compiled(table: Table) -> Any:
    """The compiled functions of a table, kept for all tests of it."""
    if table not in _compiled:
        _compiled[table] = (
            jax.jit(lambda state, *given: device.insert(table, state, *given)),
            jax.jit(lambda state, draws: device.sample(table, state, draws)),
            jax.jit(lambda state, keys, p: device.update_priorities(table, state, keys, p)),
        )
    return _compiled[table]


class InService:
    """A service with one client."""

    def __init__(self, table: Table, example: Any, num_envs: int) -> None:
        self._service = ReplayService(HostTable(table, example, num_envs))
        self.insert = self._service.insert
        self.update_priorities = self._service.update_priorities
        self.layout = self._service.table.layout

    def sample(self, draws: Array) -> Sample:
        return self._service.sample(draws)

    @property
    def size(self) -> int:
        return self._service.size


class Elsewhere:
    """A server, or two, in other processes; kept for all tests of a table, and emptied for each."""

    kept: ClassVar[dict[Any, tuple[ReplayServer | ReplayShards, ReplayClient, Any]]] = {}

    def __init__(
        self, table: Table, example: Any, num_envs: int, shards: int = 0, tcp: bool = False
    ) -> None:
        leaves = tuple((leaf.path, str(leaf)) for leaf in leaves_of(example))
        self._named = (table, leaves, num_envs, shards, tcp)
        if self._named not in self.kept:
            if shards:
                server = ReplayShards(table, example, num_envs, shards, timeout=20)
            else:
                listen = "127.0.0.1:0" if tcp else None
                server = ReplayServer(table, example, num_envs, timeout=20, listen=listen)
            remote = server.remote if isinstance(server, ReplayServer) else None
            client = server.client() if remote is None else ReplayClient(remote, example)
            self.kept[self._named] = (server, client, client.state())
        _, self.client, empty = self.kept[self._named]
        self.client.load(empty)
        self.insert = self.client.insert
        self.update_priorities = self.client.update_priorities
        self.sample = self.client.sample
        self.layout = self.client.form.layout

    @property
    def layouts(self) -> list[TableSizes]:
        return [server.form.layout for server in self.client._servers]

    @property
    def size(self) -> int:
        return self.client.size


class Sharded(Elsewhere):
    def __init__(self, table: Table, example: Any, num_envs: int) -> None:
        super().__init__(table, example, num_envs, 2)


class OverTcp(Elsewhere):
    def __init__(self, table: Table, example: Any, num_envs: int) -> None:
        super().__init__(table, example, num_envs, tcp=True)


def close_servers() -> None:
    """Ends what is kept for other tests."""
    while Elsewhere.kept:
        server, client, _ = Elsewhere.kept.popitem()[1]
        client.close()
        server.close()


KINDS: dict[str, Any] = {
    "host": HostTable,
    "device": OnDevice,
    "service": InService,
    "server": Elsewhere,
    "shards": Sharded,
    "tcp": OverTcp,
}


def make(kind: str, table: Table, example: Any, num_envs: int) -> AnyTable:
    return KINDS[kind](table, example, num_envs)
