"""Which device an array is on, and how it gets to another: one device, or split over several."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dovetail.boundaries import BATCH_AXIS
from dovetail.graph.primitives import REPLICA_AXIS
from dovetail.runtime.distributed import placed

Device = Any
"""A `jax.Device`."""
WHOLE = PartitionSpec()
"""A copy on every device."""
PER_REPLICA = PartitionSpec(REPLICA_AXIS)
"""Each replica's own, along a leading axis."""
BY_ENVIRONMENT = PartitionSpec(*[None] * BATCH_AXIS, REPLICA_AXIS)
"""Each replica with its share of the environments, or of a batch's items."""


def mesh_of(devices: Sequence[Device]) -> Mesh:
    """The devices as learner replicas."""
    return Mesh(list(devices), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))


def own_devices(mesh: Mesh) -> list[Device]:
    """The devices of a mesh that are this process's."""
    here = jax.process_index()
    return [device for device in mesh.devices.flat if device.process_index == here]


def to_device(array: Any, device: Device) -> Any:
    """The array where a program on `device` can take it; numpy arrays can stay as they are."""
    if not isinstance(array, jax.Array):
        return array
    found = array.sharding.device_set
    if found == {device}:
        return array
    if not array.is_fully_replicated and array.is_fully_addressable:
        return jax.device_put(array, device)  # joins what lies on several
    shards = array.addressable_shards
    near = next((shard.data for shard in shards if shard.device == device), None)
    if near is not None and near.shape == array.shape:
        return near
    return jax.device_put(shards[0].data if len(found) > 1 else array, device)


def replicated(array: Any, mesh: Mesh) -> jax.Array:
    """A copy of the array on every device of the mesh; itself if it is that already."""
    sharding = NamedSharding(mesh, WHOLE)
    if isinstance(array, jax.Array) and array.sharding == sharding:
        return array
    return placed(array, sharding)


def split_over(pieces: Any, mesh: Mesh) -> jax.Array:
    """One array, or several copies' pieces of it, joined along the batch: each device has its own
    part, and what is on its device already is not copied. Other processes bring their own
    pieces."""
    devices = own_devices(mesh)
    if not isinstance(pieces, list):
        pieces = [pieces]
    if len(pieces) < len(devices):
        whole = _concatenated([np.asarray(piece) for piece in pieces])
        pieces = np.split(whole, len(devices), axis=BATCH_AXIS)
    each = len(pieces) // len(devices)
    shards = [
        jax.device_put(_concatenated(pieces[i * each : (i + 1) * each]), device)
        for i, device in enumerate(devices)
    ]
    shape = list(shards[0].shape)
    shape[BATCH_AXIS] *= mesh.size
    sharding = NamedSharding(mesh, BY_ENVIRONMENT)
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards)


def _concatenated(pieces: Sequence[Any]) -> Any:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate([np.asarray(piece) for piece in pieces], axis=BATCH_AXIS)
