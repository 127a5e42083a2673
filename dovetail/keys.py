"""Random keys whose hash XLA compiles into one loop.

JAX's own threefry keeps its rounds in a loop of tiny kernels on a CPU; inside a scan over
environment steps they cost more than the policy network. Here every round is written out. The bits
are the same as of `jax.random.key(seed)` (https://www.thesalmons.org/john/random123, Threefry-2×32
with 20 rounds), and every function of `jax.random` takes such keys.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

Words = tuple[jax.Array, jax.Array]

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
TAG = "dvt"
PARITY = np.uint32(0x1BD11BDA)


def seed_key(seed: int | jax.Array) -> jax.Array:
    """The key of a seed."""
    return jax.random.key(seed, impl=_threefry)


def from_words(words: Any) -> jax.Array:
    """The keys whose `jax.random.key_data` is `words`."""
    return jax.random.wrap_key_data(words, impl=_threefry)


def is_ours(keys: jax.Array) -> bool:
    """Whether keys are of this module's kind."""
    return str(jax.random.key_impl(keys)) == TAG


def _hash(key: jax.Array, count: Words) -> Words:
    """Twenty rounds on two words."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    x, y = count[0] + key[0], count[1] + key[1]
    for group in range(5):
        for bits in ROTATIONS[group % 2]:
            x = x + y
            y = ((y << np.uint32(bits)) | (y >> np.uint32(32 - bits))) ^ x
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def _counts(shape: Sequence[int]) -> Words:
    """0, 1, 2, … over `shape`, as high and low words."""
    size = int(np.prod(shape, dtype=np.int64))
    low = jax.lax.iota(jnp.uint32, size).reshape(shape)
    return jnp.zeros(shape, jnp.uint32), low


def _seed(seed: jax.Array) -> jax.Array:
    return jnp.stack([jnp.zeros((), jnp.uint32), seed.astype(jnp.uint32)])


def _split(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    return jnp.stack(_hash(key, _counts(shape)), axis=-1)


def _fold_in(key: jax.Array, data: Any) -> jax.Array:
    return jnp.stack(_hash(key, (jnp.zeros((), jnp.uint32), data.astype(jnp.uint32))))


def _random_bits(key: jax.Array, width: int, shape: Sequence[int]) -> jax.Array:
    high, low = _hash(key, _counts(shape))
    if width == 64:
        return (high.astype(jnp.uint64) << np.uint64(32)) | low.astype(jnp.uint64)
    return (high ^ low).astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[width])


_threefry = define_prng_impl(
    key_shape=(2,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="dovetail_threefry",
    tag=TAG,
)
