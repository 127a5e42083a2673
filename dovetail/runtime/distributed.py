"""Programs over the devices of several processes, joined with `jax.distributed`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dovetail.graph.primitives import REPLICA_AXIS
from dovetail.runtime.arrays import Leaf
from dovetail.runtime.wire import KeyWords, pack, unpack_keys

JOIN_SECONDS = 60
"""How long the processes wait for each other at the start, in seconds."""


def join_processes(coordinator: str, processes: int, rank: int) -> None:
    """Joins this process as `rank`; call it before JAX initializes its backends."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        coordinator_bind_address=coordinator,  # by default, every address of the machine
        num_processes=processes,
        process_id=rank,
        initialization_timeout=JOIN_SECONDS,
    )


def placed(array: Leaf, sharding: NamedSharding) -> jax.Array:
    """Shards an array, of which every process has all of it, over the devices of all processes."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    # numpy has no arrays of keys, so their words are placed.
    packed = pack(own_part(array))
    if isinstance(packed, KeyWords):
        return unpack_keys(replace(packed, words=placed(packed.words, sharding)))
    return jax.make_array_from_callback(packed.shape, sharding, lambda index: packed[index])


def own_part(leaf: Leaf) -> Leaf:
    """This process's part of an array that may span several processes."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    shards = leaf.addressable_shards
    if leaf.is_fully_replicated:
        return shards[0].data
    # The shards need not be in the order of the environments.
    ordered = sorted(shards, key=lambda shard: shard.index[0].start or 0)
    return jnp.concatenate([shard.data for shard in ordered])


class MeshLayout:
    """Replicates the learner's state over a mesh and shards the actors' state."""

    def __init__(self, mesh: Mesh) -> None:
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._divided = NamedSharding(mesh, PartitionSpec(REPLICA_AXIS))

    def shapes(
        self, state: list[Leaf], actor: list[Leaf]
    ) -> tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct]]:
        """The global shapes, given the arrays of one process."""
        processes = jax.process_count()
        whole = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._whole) for x in state]
        divided = [
            jax.ShapeDtypeStruct((x.shape[0] * processes, *x.shape[1:]), x.dtype) for x in actor
        ]
        return whole, [s.update(sharding=self._divided) for s in divided]

    def place(self, state: list[Leaf], actor: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
        """The global arrays, given the arrays of one process."""
        return [placed(x, self._whole) for x in state], [self._divide(x) for x in actor]

    def _divide(self, leaf: Leaf) -> jax.Array:
        packed = pack(leaf)
        if isinstance(packed, KeyWords):
            words = jax.make_array_from_process_local_data(self._divided, packed.words)
            return unpack_keys(replace(packed, words=words))
        return jax.make_array_from_process_local_data(self._divided, packed)
