"""Random keys whose hash XLA compiles into one loop.

On CPU, JAX's own threefry runs its rounds as a loop of tiny kernels. Inside a scan over
environment steps they cost more than the policy network. Here the rounds are unrolled. The bits
equal those of `jax.random.key(seed)` (Threefry-2×32 with 20 rounds,
https://www.thesalmons.org/john/random123), and every function of `jax.random` accepts these keys.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

from dovetail.errors import UserError

Words = tuple[jax.Array, jax.Array]

# The rotation distances and the key schedule's parity word of Threefry-2×32.
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
TAG = "dvt"
PARITY = np.uint32(0x1BD11BDA)


def seed_key(seed: int | jax.Array) -> jax.Array:
    """Returns the key for a seed."""
    return jax.random.key(seed, impl=_threefry)


def from_words(words: Any) -> jax.Array:
    """Returns the keys whose `jax.random.key_data` is `words` [..., 2]."""
    return jax.random.wrap_key_data(words, impl=_threefry)


def is_ours(keys: jax.Array) -> bool:
    """Whether keys use this module's implementation."""
    return str(jax.random.key_impl(keys)) == TAG


def plain(leaf: Any) -> Any:
    """The words of random keys, which any file and program can hold; other leaves unchanged."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def unplain(leaf: Any) -> Callable[[Any], Any]:
    """The inverse of `plain` for leaves like `leaf`, which it does not keep."""
    if not _is_key(leaf):
        return lambda found: found
    if is_ours(leaf):
        return from_words
    return partial(jax.random.wrap_key_data, impl=jax.random.key_impl(leaf))


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


@partial(jax.jit, inline=True)
def _hash(key: jax.Array, count: Words) -> Words:
    """Twenty rounds on two words.

    `jit` caches the trace per shape: a program contains dozens of these hashes, with more than a
    hundred operations each.
    """
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
    """The counters 0, 1, 2, … in `shape`, as high and low words."""
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
    return _bits(_hash(key, _counts(shape)), width)


def _bits(words: Words, width: int) -> jax.Array:
    high, low = words
    if width == 64:
        return (high.astype(jnp.uint64) << np.uint64(32)) | low.astype(jnp.uint64)
    # JAX's partitionable threefry also combines the two words by xor.
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


# Keys for a split batch. Each learner copy draws its part of the array that a single learner would
# draw for the whole batch, so that the result does not depend on the number of copies.


class BatchPart(NamedTuple):
    """The part of a batch that a key draws."""

    size: int
    """Number of rows in the part."""
    parts: int
    """Number of parts in the batch."""
    axis: int
    """The axis of the rows in every drawn array."""


_known: dict[str, BatchPart] = {}
"""The parts by the tag of their key implementation."""


def part_keys(keys: jax.Array, part: jax.Array, size: int, parts: int, axis: int = 0) -> jax.Array:
    """Returns keys for part number `part` of a batch of `parts` equal parts, `size` items each.

    Every drawn array must have `size` entries on `axis`; it equals that part of the array that
    `keys` would draw for the whole batch.
    """
    words = jax.random.key_data(keys)
    number = jnp.broadcast_to(part.astype(jnp.uint32), (*words.shape[:-1], 1))
    return jax.random.wrap_key_data(
        jnp.concatenate([words, number], axis=-1), impl=_of_parts(BatchPart(size, parts, axis))
    )


def for_all(keys: jax.Array) -> jax.Array:
    """Returns the whole batch's keys for keys of a part, and other keys unchanged.

    Use them for draws that are not per item and must be equal in all parts.
    """
    if _part_of(keys) is None:
        return keys
    return from_words(jax.random.key_data(keys)[..., :2])


def on_axis(keys: jax.Array, axis: int, each: int = 1) -> jax.Array:
    """Returns keys of a part that draw its items on another axis; other keys are unchanged.

    Each item takes `each` consecutive rows.
    """
    part = _part_of(keys)
    if part is None:
        return keys
    impl = _of_parts(BatchPart(part.size * each, part.parts, axis))
    return jax.random.wrap_key_data(jax.random.key_data(keys), impl=impl)


def _part_of(keys: jax.Array) -> BatchPart | None:
    return _known.get(str(jax.random.key_impl(keys)))


@cache
def _of_parts(whose: BatchPart) -> Any:
    """A key implementation with three words; the third is the number of the part."""
    size, parts, axis = whose

    def counts(part: jax.Array, shape: Sequence[int]) -> Words:
        if len(shape) <= axis or shape[axis] != size:
            raise UserError(
                f"A learner replica draws an array of shape {list(shape)} with keys for its {size} "
                f"items of a batch, which must stand on axis {axis}: say where they stand with "
                f"dovetail.keys.on_axis(key, axis), or draw what is not for each item with "
                f"dovetail.keys.for_all(key)."
            )
        # Each entry's row-major position in the whole batch's array is its counter.
        whole = [n * parts if i == axis else n for i, n in enumerate(shape)]
        at = jnp.zeros(shape, jnp.uint32)
        for i, n in enumerate(whole):
            index = jax.lax.broadcasted_iota(jnp.uint32, shape, i)
            index = index + part * np.uint32(size) if i == axis else index
            at = at * np.uint32(n) + index
        return jnp.zeros(shape, jnp.uint32), at

    def with_part(words: jax.Array, part: jax.Array) -> jax.Array:
        return jnp.concatenate([words, jnp.broadcast_to(part, (*words.shape[:-1], 1))], axis=-1)

    def random_bits(key: jax.Array, width: int, shape: Sequence[int]) -> jax.Array:
        return _bits(_hash(key, counts(key[2], shape)), width)

    tag = f"{TAG}{size}x{parts}@{axis}"
    _known[tag] = whose
    return define_prng_impl(
        key_shape=(3,),
        seed=lambda seed: with_part(_seed(seed), jnp.zeros((), jnp.uint32)),
        split=lambda key, shape: with_part(_split(key, shape), key[2]),
        random_bits=random_bits,
        fold_in=lambda key, data: with_part(_fold_in(key, data), key[2]),
        name=f"dovetail_threefry_{size}_of_{parts}_on_{axis}",
        tag=tag,
    )
