"""One program over the devices of several processes, joined with `jax.distributed`."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from dovetail.runtime.wire import pack, unpack

JOIN_SECONDS = 60
"""How long the processes wait for each other at the start."""


def join_processes(coordinator: str, processes: int, rank: int) -> None:
    """Makes this process number `rank` of several; before JAX has started in it."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        num_processes=processes,
        process_id=rank,
        initialization_timeout=JOIN_SECONDS,
    )


def placed(array: Any, sharding: NamedSharding) -> jax.Array:
    """An array that every process has whole, laid out over the devices of all of them."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        packed = pack(array)
        return unpack(replace(packed, words=placed(packed.words, sharding)))
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
