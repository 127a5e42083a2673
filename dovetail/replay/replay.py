"""A replay table as a value: its options and its arrays.

It is part of a learner's state, passed from one iteration to the next like the rest of the state,
and a pytree whose leaves are the stored arrays. `RemoteReplay` (`service/remote.py`) is the other
kind.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.errors import UserError
from dovetail.replay.device import table as device
from dovetail.replay.sample import ItemKeys, Sample
from dovetail.replay.table import Table


class Insertion(NamedTuple):
    """Rows to be inserted into a table; every leaf is [T, B, …]."""

    rows: Any
    terminated: Any
    truncated: Any
    first: Any
    """Whether the row starts an episode."""
    valid: Any
    """False for rows that are not steps."""
    final: Any
    """Part of a row's tree: the successor of each row, read where an episode ends."""
    priorities: Any
    """Priority of the item that starts at each row; None for the highest so far."""
    streams: Any
    """Environment numbers [1, B]."""


class Replay:
    """A replay in a learner's state, wherever its rows are stored."""

    table: Table
    shards: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceReplay(Replay):
    """A table with its contents on the device."""

    state: device.State
    table: Table = field(metadata={"static": True})
    streams: int = field(metadata={"static": True})
    """Number of environments whose rows it stores."""
    shards: int = field(metadata={"static": True})
    """Number of shards of the whole replay; this is one of them."""

    @staticmethod
    def empty(table: Table, example: Any, num_envs: int, shards: int = 1) -> "DeviceReplay":
        """An empty table for rows like `example` from `num_envs` environments; with several shards,
        one of them, with its part of the environments and of the capacity."""
        part, streams = shard_of(table, num_envs, shards)
        return DeviceReplay(device.init(part, example, streams), part, streams, shards)

    def insert(self, sent: Insertion, pieces: int = 1) -> "DeviceReplay":
        """Inserts the rows of `pieces` equal groups of environments, one group after another: two
        groups may be successive unrolls of the same environments."""
        state = self.state
        for piece in range(pieces):
            part = jax.tree.map(lambda x, i=piece: _piece(x, i, pieces), sent)
            # Environment numbers are global; a shard holds a contiguous range of them.
            streams = part.streams[0] % self.streams
            state = device.break_off(self.table, state, part.first[0], streams)
            state = device.insert(
                self.table,
                state,
                part.rows,
                ends=part.terminated | part.truncated,
                valid=part.valid,
                final=part.final,
                priorities=part.priorities,
                streams=streams,
            )
        return replace(self, state=state)

    def sample(self, draws: jax.Array) -> tuple["DeviceReplay", Sample]:
        """Batches of items for draws [K, n] from [0, 1): arrays [K, n, …], including `size`. Every
        batch covers all strata."""
        batches, each = draws.shape
        state, found = device.sample(self.table, self.state, draws.ravel(), batches)
        found = found._replace(size=jnp.broadcast_to(found.size, draws.size))
        shaped = jax.tree.map(lambda x: x.reshape(batches, each, *x.shape[1:]), found)
        return replace(self, state=state), shaped

    def update_priorities(self, keys: ItemKeys, priorities: jax.Array) -> "DeviceReplay":
        """Sets the priorities [K, n] of items."""
        flat = jax.tree.map(jnp.ravel, keys)
        state = device.update_priorities(self.table, self.state, flat, priorities.ravel())
        return replace(self, state=state)

    @property
    def size(self) -> jax.Array:
        """Number of items that can be sampled."""
        return device.size(self.table, self.state)


def shard_of(table: Table, num_envs: int, shards: int) -> tuple[Table, int]:
    """(options of one of `shards` equal shards of a table, its number of environments)."""
    if num_envs % shards:
        raise UserError(
            f"The rows of {num_envs} environments cannot be split evenly among {shards} shards "
            f"of a replay: choose a multiple of {shards} environments (--num-envs)."
        )
    # Rounded up, so that the shards together hold at least the capacity.
    return replace(table, capacity=-(-table.capacity // shards)), num_envs // shards


def _piece(x: jax.Array, index: int, pieces: int) -> jax.Array:
    size = x.shape[1] // pieces
    return x[:, index * size : (index + 1) * size]


def of_shards(found: Sample, shards: int) -> Sample:
    """A sample drawn in equal parts from equal shards, as a sample of the whole replay."""
    if shards == 1:
        return found
    # Every item of a batch comes from one of the equal shards with probability 1 / shards.
    return found._replace(probabilities=found.probabilities / shards, size=found.size * shards)


def _is_replay(part: Any) -> bool:
    return isinstance(part, DeviceReplay)


def has_table(state: Any) -> bool:
    """Whether a learner's state holds a device table, not only a reference to a remote one."""
    return any(_is_replay(part) for part in jax.tree.leaves(state, is_leaf=_is_replay))


def all_shards(state: Any) -> Any:
    """A learner's state with all shards of its (empty, hence identical) replay: with several
    shards, each array gets a leading shard axis."""

    def stacked(part: Any) -> Any:
        if not isinstance(part, DeviceReplay) or part.shards == 1:
            return part
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (part.shards, *x.shape)), part)

    return jax.tree.map(stacked, state, is_leaf=_is_replay)


def with_own_replay(state: Any) -> Any:
    """A learner's state with a copy of its replay arrays, because a run updates them in place."""

    def copied(part: Any) -> Any:
        return jax.tree.map(jnp.copy, part) if _is_replay(part) else part

    return jax.tree.map(copied, state, is_leaf=_is_replay)


def insertion(trajectory: Any, rows: Any, final: Any, priorities: Any) -> Insertion:
    """The insertion of a trajectory's rows."""
    return Insertion(
        rows=rows,
        terminated=trajectory.terminated,
        truncated=trajectory.truncated,
        first=trajectory.first,
        valid=trajectory.valid,
        final=final,
        priorities=priorities,
        streams=trajectory.last.number,
    )
