"""The trajectory buffers of an unroll with host environments.

The loop writes the leaves that are read, row by row, into numpy buffers, and the learner's program
takes these without a copy. Environments that step together write to their own views. The views are
made beforehand, since one more index costs as much as half an assignment.
"""

from collections.abc import Sequence
from itertools import compress
from typing import Protocol, cast

import jax
import numpy as np

from dovetail.envs.interface import Observation
from dovetail.graph.ir import Unroll, Value
from dovetail.runtime.act_program import ActProgram
from dovetail.runtime.arrays import Leaf, is_key
from dovetail.runtime.packing import Slab
from dovetail.trajectory import Timestep, Trajectory

ALWAYS = frozenset({"observation", "action", "reward", "terminated", "truncated", "first", "valid"})
"""Fields that the loop itself reads or writes, even if no one else reads them."""

Kept = list[tuple[int, np.ndarray]]
"""The leaves of a tree that are read, each with its position."""


class HostTrajectory(Protocol):
    """A `Trajectory` of numpy buffers [T, B, …]."""

    observation: Observation
    action: object
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    first: np.ndarray
    valid: np.ndarray
    next_observation: Observation
    extras: object
    bootstrap: object
    carry: object
    last: object


class UnrollBuffers:
    """Buffers for one unroll; each of `parts` is a slice of environments that step together."""

    def __init__(
        self, unroll: Unroll, slab: Slab | None, acting: ActProgram, parts: Sequence[slice]
    ) -> None:
        self.memory, arrays = (None, {}) if slab is None else slab.buffers()
        """The memory block of the buffers; None without a slab."""
        # A leaf that is not written is a broadcast zero: it has its shape but no memory.
        written = {value.id for value in written_values(unroll)}
        buffers = [
            arrays[value.id]
            if value.id in arrays
            else np.zeros(value.shape, value.dtype)
            if value.id in written
            else np.broadcast_to(np.zeros((), value.dtype), value.shape)
            for value in unroll.trajectory
        ]
        self.trajectory = cast(HostTrajectory, unroll.trajectory_tree.unflatten(buffers))
        live = unroll.trajectory_tree.unflatten(unroll.live)
        extras = [row for _, row in _kept(self.trajectory.extras, live.extras)]
        self.made = [*jax.tree.leaves(self.trajectory.action), *extras]
        self.carry = _kept(self.trajectory.carry, live.carry)
        self.last = _kept(self.trajectory.last, live.last)
        self.bootstrap = _kept(self.trajectory.bootstrap, live.bootstrap)
        self.writer = acting.writer(self.made)
        """Writes the results of acting calls that serve all environments."""
        final = _kept(self.trajectory.next_observation, live.next_observation)
        self.info: np.ndarray | None = None
        """Logged values of the environments' `info`, [T, B, K]; None without any."""
        if unroll.info:
            batch = parts[-1].stop
            self.info = np.full((unroll.length, batch, unroll.info), np.nan, np.float32)
        self.shares = [
            BufferPart(self.trajectory, final, part, acting, self.info) for part in parts
        ]


class BufferPart:
    """The rows of environments that step together, as views [T, part, …]."""

    def __init__(
        self,
        trajectory: HostTrajectory,
        final: Kept,
        part: slice,
        acting: ActProgram,
        info: np.ndarray | None,
    ) -> None:
        self.part = part
        self.info = None if info is None else info[:, part]
        self.rewards = trajectory.reward[:, part]
        self.terminations = trajectory.terminated[:, part]
        self.truncations = trajectory.truncated[:, part]
        self.valid = trajectory.valid[:, part]
        self.firsts: list[np.ndarray] = list(trajectory.first[:, part])
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


def _kept(tree: object, live: object) -> Kept:
    flags = zip(jax.tree.leaves(tree), jax.tree.leaves(live), strict=True)
    return [(i, leaf) for i, (leaf, is_live) in enumerate(flags) if is_live]


def copy_into(rows: object, tree: object) -> None:
    """Copies every leaf into its row; a bare array, the common case, without walking a tree."""
    if isinstance(rows, np.ndarray):
        rows[...] = tree
        return
    for row, leaf in zip(jax.tree.leaves(rows), jax.tree.leaves(tree), strict=True):
        row[...] = leaf


def as_host(leaf: Leaf) -> Leaf:
    """Converts to numpy, except random keys, which stay unchanged."""
    return leaf if isinstance(leaf, np.ndarray) or is_key(leaf) else np.asarray(leaf)


def host_timestep(
    observation: Observation, reward: np.ndarray, first: np.ndarray, number: np.ndarray
) -> Timestep:
    """A timestep of numpy arrays [B, …], which compiled acting takes like JAX arrays."""
    return Timestep(observation, cast(jax.Array, reward), cast(jax.Array, first), number)
