"""The trajectory buffers of an unroll with host environments.

The loop writes the leaves that are read, row by row, into numpy buffers, and the learner's program
takes these without a copy. Environments that step together write to their own views. The views are
made beforehand, since one more index costs as much as half an assignment.
"""

from collections.abc import Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.graph.ir import Unroll, Value
from dovetail.runtime.act_program import ActProgram
from dovetail.runtime.packing import Slab
from dovetail.trajectory import Trajectory

ALWAYS = frozenset({"observation", "action", "reward", "terminated", "truncated", "first", "valid"})
"""Fields that the loop itself reads or writes, even if no one else reads them."""

Kept = list[tuple[int, np.ndarray]]
"""The leaves of a tree that are read, each with its position."""


class UnrollBuffers:
    """Buffers for one unroll; each of `parts` is a slice of environments that step together."""

    def __init__(
        self, unroll: Unroll, slab: Slab | None, acting: ActProgram, parts: Sequence[slice]
    ) -> None:
        self.memory, arrays = (None, {}) if slab is None else slab.buffers()
        """The memory block of the buffers; None without a slab."""
        # A leaf that is not written is a broadcast zero: it has its shape but no memory.
        written = {value.id for value in written_values(unroll)}
        self.trajectory: Trajectory = unroll.trajectory_tree.unflatten(
            [
                arrays[value.id]
                if value.id in arrays
                else np.zeros(value.shape, value.dtype)
                if value.id in written
                else np.broadcast_to(np.zeros((), value.dtype), value.shape)
                for value in unroll.trajectory
            ]
        )
        live: Trajectory = unroll.trajectory_tree.unflatten(unroll.live)
        extras = [row for _, row in _kept(self.trajectory.extras, live.extras)]
        self.made = [*jax.tree.leaves(self.trajectory.action), *extras]
        self.carry = _kept(self.trajectory.carry, live.carry)
        self.last = _kept(self.trajectory.last, live.last)
        self.bootstrap = _kept(self.trajectory.bootstrap, live.bootstrap)
        self.writer = acting.writer(self.made)
        """Writes the results of acting calls that serve all environments."""
        final = _kept(self.trajectory.next_observation, live.next_observation)
        self.shares = [BufferPart(self.trajectory, final, part, acting) for part in parts]


class BufferPart:
    """The rows of environments that step together, as views [T, part, …]."""

    def __init__(
        self, trajectory: Trajectory, final: Kept, part: slice, acting: ActProgram
    ) -> None:
        buffers: Any = trajectory
        self.part = part
        self.rewards: np.ndarray = buffers.reward[:, part]
        self.terminations: np.ndarray = buffers.terminated[:, part]
        self.truncations: np.ndarray = buffers.truncated[:, part]
        self.valid: np.ndarray = buffers.valid[:, part]
        self.firsts: list[np.ndarray] = list(buffers.first[:, part])
        self.next_observation: Kept = [(i, buffer[:, part]) for i, buffer in final]
        self.observations = [
            jax.tree.map(lambda buffer, t=t: buffer[t, part], trajectory.observation)
            for t in range(len(self.rewards))
        ]
        self.seen = [
            list(compress(jax.tree.leaves(row), acting.observed)) for row in self.observations
        ]
        """For each step, the observation leaves that acting reads."""


def leaf_fields(unroll: Unroll) -> list[str]:
    """The field of `Trajectory` that each leaf belongs to."""
    numbered = unroll.trajectory_tree.unflatten(range(len(unroll.trajectory)))
    return [name for name in Trajectory._fields for _ in jax.tree.leaves(getattr(numbered, name))]


def written_values(unroll: Unroll) -> list[Value]:
    """The values of the trajectory that the loop writes: those that are read."""
    leaves = zip(unroll.trajectory, unroll.live, leaf_fields(unroll), strict=True)
    return [value for value, live, name in leaves if live or name in ALWAYS]


def _kept(tree: Any, live: Any) -> Kept:
    flags = zip(jax.tree.leaves(tree), jax.tree.leaves(live), strict=True)
    return [(i, leaf) for i, (leaf, is_live) in enumerate(flags) if is_live]


def copy_into(rows: Any, tree: Any) -> None:
    """Copies every leaf into its row; a bare array, the common case, without walking a tree."""
    if isinstance(rows, np.ndarray):
        rows[...] = tree
        return
    for row, leaf in zip(jax.tree.leaves(rows), jax.tree.leaves(tree), strict=True):
        row[...] = leaf


def as_host(leaf: Any) -> Any:
    """Converts to numpy, except random keys, which stay unchanged."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return leaf if is_key or isinstance(leaf, np.ndarray) else np.asarray(leaf)
