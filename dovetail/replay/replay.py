"""A replay table as a value: its options, and the arrays that it holds.

It is part of a learner's state, passed on from one iteration to the next like everything else in
it, and a pytree: what it holds are its leaves.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from dovetail.replay import device
from dovetail.replay.sample import Keys, Sample
from dovetail.replay.table import Table


class Insertion(NamedTuple):
    """Rows on their way to a table; every leaf is [T, B, …]."""

    rows: Any
    terminated: Any
    truncated: Any
    first: Any
    """Whether an episode begins with the row."""
    valid: Any
    """False for rows that are no step."""
    final: Any
    """A part of the rows' tree: what was seen after each row, read where an episode ends."""
    priorities: Any
    """Those of the items that begin with each row; None for the highest so far."""
    streams: Any
    """The environments' numbers [1, B]."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Replay:
    """A table and what it holds."""

    state: device.State
    table: Table = field(metadata={"static": True})

    @staticmethod
    def empty(table: Table, example: Any, num_envs: int) -> "Replay":
        """A table for rows like `example` of so many environments."""
        return Replay(device.init(table, example, num_envs), table)

    def insert(self, sent: Insertion, pieces: int = 1) -> "Replay":
        """The rows of `pieces` equal groups of environments, one group after the other: two may be
        successive unrolls of the same environments."""
        state = self.state
        for piece in range(pieces):
            part = jax.tree.map(lambda x, i=piece: _piece(x, i, pieces), sent)
            streams = part.streams[0]
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
        return Replay(state, self.table)

    def sample(self, draws: jax.Array) -> tuple["Replay", Sample]:
        """Items for draws [n] from [0, 1)."""
        state, found = device.sample(self.table, self.state, draws)
        return Replay(state, self.table), found

    def update_priorities(self, keys: Keys, priorities: jax.Array) -> "Replay":
        """Gives items other priorities [n]."""
        state = device.update_priorities(self.table, self.state, keys, priorities)
        return Replay(state, self.table)

    @property
    def size(self) -> jax.Array:
        """Items that can be sampled."""
        return device.size(self.table, self.state)


def _piece(x: jax.Array, index: int, pieces: int) -> jax.Array:
    size = x.shape[1] // pieces
    return x[:, index * size : (index + 1) * size]


def insertion(
    trajectory: Any, rows: Any, final: Any, priorities: Any, index: jax.Array
) -> Insertion:
    """What is sent of a trajectory's rows; `index` [B] are its environments' numbers."""
    return Insertion(
        rows=rows,
        terminated=trajectory.terminated,
        truncated=trajectory.truncated,
        first=trajectory.first,
        valid=trajectory.valid,
        final=final,
        priorities=priorities,
        streams=index[None],
    )
