"""The buffers that an unroll with host environments writes its trajectory into.

What the trajectory's readers use is written row by row into numpy buffers, which the learner's
program takes as they are. Environments that step together write to views of their own, which are
made beforehand: one more index costs as much as half an assignment.
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
"""Fields that the loop itself reads or writes, whoever else does."""

Kept = list[tuple[int, np.ndarray]]
"""Leaves of a tree that somebody reads, each with its position."""


class UnrollBuffers:
    """Buffers for one unroll; `parts` are the environments that step together."""

    def __init__(
        self, unroll: Unroll, slab: Slab | None, acting: ActProgram, parts: Sequence[slice]
    ) -> None:
        self.memory, arrays = (None, {}) if slab is None else slab.buffers()
        """What the buffers lie in, if in one piece."""
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
        """What writes the calls of acting that serve all environments."""
        final = _kept(self.trajectory.next_observation, live.next_observation)
        self.shares = [BufferPart(self.trajectory, final, part, acting) for part in parts]


class BufferPart:
    """The rows of some environments that step together: views of [T, part, …]."""

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
        """Of each row what acting looks at."""


def leaf_fields(unroll: Unroll) -> list[str]:
    """The field of `Trajectory` to which each leaf belongs."""
    numbered = unroll.trajectory_tree.unflatten(range(len(unroll.trajectory)))
    return [name for name in Trajectory._fields for _ in jax.tree.leaves(getattr(numbered, name))]


def written_values(unroll: Unroll) -> list[Value]:
    """The values of the trajectory that are written: those that somebody reads."""
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
    """A numpy array, but for random keys, which stay as they are."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return leaf if is_key or isinstance(leaf, np.ndarray) else np.asarray(leaf)
