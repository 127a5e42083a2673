"""Moves arrays to one device, replicates them, or shards them over several devices."""

from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dovetail.boundaries import BATCH_AXIS
from dovetail.graph.primitives import REPLICA_AXIS
from dovetail.runtime.arrays import Input, Leaf
from dovetail.runtime.distributed import placed

WHOLE = PartitionSpec()
"""Replicated on every device."""
PER_REPLICA = PartitionSpec(REPLICA_AXIS)
"""Sharded along a leading axis, one slice per replica."""
BY_ENVIRONMENT = PartitionSpec(*[None] * BATCH_AXIS, REPLICA_AXIS)
"""Sharded along the batch axis: environments, or the items of a batch."""


class Device(Protocol):
    """A `jax.Device`; JAX ships no types for it."""

    @property
    def process_index(self) -> int:
        """The rank of the process that owns it."""
        ...


def mesh_of(devices: Sequence[Device]) -> Mesh:
    """A mesh with one learner replica per device."""
    return Mesh(list(devices), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))


def own_devices(mesh: Mesh) -> list[Device]:
    """The devices of a mesh that belong to this process."""
    here = jax.process_index()
    return [device for device in mesh.devices.flat if device.process_index == here]


def to_device(array: Leaf, device: Device) -> Leaf:
    """Moves a JAX array to `device` if needed; programs take numpy arrays as they are.

    An array that is already there is returned itself, without a copy.
    """
    if not isinstance(array, jax.Array):
        return array
    found = array.sharding.device_set
    if found == {device}:
        return array
    if not array.is_fully_replicated and array.is_fully_addressable:
        return jax.device_put(array, device)  # gathers the shards
    # A replicated array may have a copy on the device already.
    shards = array.addressable_shards
    near = next((shard.data for shard in shards if shard.device == device), None)
    if near is not None and near.shape == array.shape:
        return near
    return jax.device_put(shards[0].data if len(found) > 1 else array, device)


def replicated(array: Leaf, mesh: Mesh) -> jax.Array:
    """Replicates an array over the mesh; returns it unchanged if it already is."""
    sharding = NamedSharding(mesh, WHOLE)
    if isinstance(array, jax.Array) and array.sharding == sharding:
        return array
    return placed(array, sharding)


def split_over(sent: Input, mesh: Mesh) -> jax.Array:
    """Shards one array, or the pieces of several copies, along the batch axis.

    Pieces already on their device are not copied. Each process supplies the pieces of its devices.
    """
    devices = own_devices(mesh)
    pieces = sent if isinstance(sent, list) else [sent]
    if len(pieces) < len(devices):  # split on the host
        whole = _concatenated([np.asarray(piece) for piece in pieces])
        pieces = list[Leaf](np.split(whole, len(devices), axis=BATCH_AXIS))
    # Neighboring pieces go to one device, which keeps the order of the environments.
    each = len(pieces) // len(devices)
    shards = [
        jax.device_put(_concatenated(pieces[i * each : (i + 1) * each]), device)
        for i, device in enumerate(devices)
    ]
    shape = list(shards[0].shape)
    # The global shape: `mesh.size` also counts the devices of other processes.
    shape[BATCH_AXIS] *= mesh.size
    sharding = NamedSharding(mesh, BY_ENVIRONMENT)
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards)


def _concatenated(pieces: Sequence[Leaf]) -> Leaf:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate([np.asarray(piece) for piece in pieces], axis=BATCH_AXIS)
