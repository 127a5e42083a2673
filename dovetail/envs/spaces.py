"""The one mapping between Gymnasium's spaces and the arrays algorithms see.

Observations become float32 arrays, uint8 images, or a dict of named images and one "vector".
Actions arrive as int32 choices or float32 in [-1, 1] and are clipped and rescaled here, nowhere
else. The same functions serve batches of numpy arrays (host environments) and single JAX arrays
(JAX environments): `xp` is the array module, `batched` says whether there is a leading axis [B].
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import gymnasium.spaces as gym_spaces
import jax
import numpy as np

from dovetail.envs.interface import ActionSpace, Continuous, Discrete, MultiDiscrete, Observation
from dovetail.errors import UserError

VECTOR = "vector"
"""Key of the concatenated non-image part of an observation that also has images."""


@dataclass(frozen=True)
class SpaceMap:
    """Translates one environment's observations and actions."""

    observation: Any
    """A pytree of jax.ShapeDtypeStruct, without a batch axis."""
    action: ActionSpace
    encode: Callable[[Any], Observation]
    """The environment's observation → the algorithm's."""
    decode: Callable[[Any], Any]
    """The algorithm's action → the environment's."""
    bounds: tuple[tuple[float, ...], tuple[float, ...]] | None
    """Bounds of continuous actions, as in `EnvSpec`."""
    spaces: tuple[gym_spaces.Space[Any], gym_spaces.Space[Any]]
    """The environment's own spaces (observation, action)."""


@dataclass(frozen=True)
class SpaceLeaf:
    """One array of an observation: its path, and its conversion."""

    path: tuple[str | int, ...]
    image: bool
    shape: tuple[int, ...]
    convert: Callable[[Any], Any]


def space_map(
    observation: gym_spaces.Space[Any],
    action: gym_spaces.Space[Any],
    env_id: str,
    *,
    xp: ModuleType = np,
    batched: bool = True,
) -> SpaceMap:
    """The mapping for an environment with these Gymnasium spaces."""
    leaves = list(_leaves(observation, (), env_id, xp, batched))
    spec, encode = _observation(observation, leaves, env_id, xp)
    action_space, decode = _action(action, env_id, xp, batched)
    bounds = None
    if isinstance(action, gym_spaces.Box):
        bounds = tuple(map(float, action.low.ravel())), tuple(map(float, action.high.ravel()))
    return SpaceMap(spec, action_space, encode, decode, bounds, (observation, action))


def _leaves(
    space: gym_spaces.Space[Any],
    path: tuple[str | int, ...],
    env_id: str,
    xp: ModuleType,
    batched: bool,
) -> Iterator[SpaceLeaf]:
    """The arrays of an observation: dict keys sorted, tuple entries in order."""
    if isinstance(space, gym_spaces.Dict):
        for key in sorted(space.spaces):
            yield from _leaves(space.spaces[key], (*path, key), env_id, xp, batched)
    elif isinstance(space, gym_spaces.Tuple):
        for index, entry in enumerate(space.spaces):
            yield from _leaves(entry, (*path, index), env_id, xp, batched)
    elif isinstance(space, gym_spaces.Box):
        image = space.dtype == np.uint8 and len(space.shape) >= 2
        yield SpaceLeaf(path, image, space.shape or (1,), _box(space, image, xp, batched))
    elif isinstance(space, gym_spaces.Discrete):
        convert = _one_hots(np.array([space.n]), np.array([space.start]), xp, batched)
        yield SpaceLeaf(path, False, (int(space.n),), convert)
    elif isinstance(space, gym_spaces.MultiDiscrete):
        counts, start = space.nvec.ravel(), np.asarray(space.start).ravel()
        yield SpaceLeaf(path, False, (int(counts.sum()),), _one_hots(counts, start, xp, batched))
    elif isinstance(space, gym_spaces.MultiBinary):
        yield SpaceLeaf(path, False, space.shape, lambda x: xp.asarray(x, np.float32))
    else:
        where = ".".join(str(part) for part in path)
        raise UserError(
            f"{env_id} has an observation{f' {where!r}' if where else ''} of the space "
            f"{type(space).__name__}, which Dovetail does not map: wrap the environment (--wrap) "
            "so that it shows Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of "
            "these."
        )


def _box(space: gym_spaces.Box, image: bool, xp: ModuleType, batched: bool) -> Callable[[Any], Any]:
    if not space.shape:
        return lambda x: xp.asarray(x, np.float32)[..., None]
    dtype = np.uint8 if image else np.float32
    if xp is np and batched:  # the common path: one C call that also makes it contiguous
        return lambda x: np.ascontiguousarray(x, dtype)
    return lambda x: xp.asarray(x, dtype)


def _one_hots(
    counts: np.ndarray, start: np.ndarray, xp: ModuleType, batched: bool
) -> Callable[[Any], Any]:
    """Concatenated one-hot vectors of the flattened entries."""
    tables = [np.eye(int(n), dtype=np.float32) for n in counts]

    def convert(x: Any) -> Any:
        x = xp.asarray(x)
        flat = x.reshape((*x.shape[: int(batched)], -1)) - start
        hots = [xp.asarray(table)[flat[..., i]] for i, table in enumerate(tables)]
        return xp.concatenate(hots, axis=-1)

    return convert


def _observation(
    space: gym_spaces.Space[Any], leaves: list[SpaceLeaf], env_id: str, xp: ModuleType
) -> tuple[Any, Callable[[Any], Observation]]:
    if not isinstance(space, gym_spaces.Dict | gym_spaces.Tuple):
        (leaf,) = leaves
        dtype = np.uint8 if leaf.image else np.float32
        return jax.ShapeDtypeStruct(leaf.shape, dtype), leaf.convert

    images = {_name(leaf, env_id): leaf for leaf in leaves if leaf.image}
    vectors = [leaf for leaf in leaves if not leaf.image]
    size = sum(math.prod(leaf.shape) for leaf in vectors)
    vector_spec = jax.ShapeDtypeStruct((size,), np.float32)

    def join(x: Any) -> Any:
        parts = []
        for leaf in vectors:
            part = leaf.convert(_at(x, leaf.path))
            lead = part.shape[: part.ndim - len(leaf.shape)]
            parts.append(part.reshape((*lead, -1)))
        return xp.concatenate(parts, axis=-1)

    if not images:
        return vector_spec, join
    spec = {name: jax.ShapeDtypeStruct(leaf.shape, np.uint8) for name, leaf in images.items()}
    if not vectors:
        return spec, lambda x: _convert_all(images, x)
    return {**spec, VECTOR: vector_spec}, lambda x: {**_convert_all(images, x), VECTOR: join(x)}


def _convert_all(images: dict[str, SpaceLeaf], x: Any) -> dict[str, Any]:
    return {name: leaf.convert(_at(x, leaf.path)) for name, leaf in images.items()}


def _name(leaf: SpaceLeaf, env_id: str) -> str:
    name = ".".join(str(part) for part in leaf.path)
    if name == VECTOR:
        raise UserError(
            f"{env_id} names an image {VECTOR!r}, the name Dovetail gives to the joined rest of an "
            "observation: rename the image in a wrapper."
        )
    return name


def _at(x: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        x = x[part]
    return x


def _action(
    space: gym_spaces.Space[Any], env_id: str, xp: ModuleType, batched: bool
) -> tuple[ActionSpace, Callable[[Any], Any]]:
    if isinstance(space, gym_spaces.Discrete):
        start = int(space.start)
        if start == 0:
            return Discrete(int(space.n)), lambda a: a
        return Discrete(int(space.n)), lambda a: a + start
    if isinstance(space, gym_spaces.MultiDiscrete):
        nvec = tuple(int(n) for n in space.nvec.ravel())
        return MultiDiscrete(nvec), _choices(space.shape, np.asarray(space.start), xp, batched)
    if isinstance(space, gym_spaces.MultiBinary):
        nvec = (2,) * math.prod(space.shape)
        decode = _choices(space.shape, np.zeros(space.shape, np.int8), xp, batched, np.int8)
        return MultiDiscrete(nvec), decode
    if isinstance(space, gym_spaces.Box):
        bounded = bool(np.all(space.bounded_below & space.bounded_above))
        action = Continuous(math.prod(space.shape), bounded)
        return action, _rescale(space, xp, batched)
    raise UserError(
        f"{env_id} takes actions of the space {type(space).__name__}, which Dovetail does not map: "
        "wrap the environment (--wrap) so that it takes Discrete, MultiDiscrete, MultiBinary or "
        "Box actions."
    )


def _choices(
    shape: tuple[int, ...],
    start: np.ndarray,
    xp: ModuleType,
    batched: bool,
    dtype: Any = np.int32,
) -> Callable[[Any], Any]:
    def decode(a: Any) -> Any:
        a = xp.asarray(a)
        return (a.reshape((*a.shape[: int(batched)], *shape)) + start).astype(dtype)

    return decode


def _rescale(space: gym_spaces.Box, xp: ModuleType, batched: bool) -> Callable[[Any], Any]:
    """[-1, 1] → [low, high] where an entry has both bounds; clips every entry to its bounds."""
    scale, offset, low, high = rescaling(space)
    whole = np.issubdtype(space.dtype, np.integer)

    def decode(a: Any) -> Any:
        x = xp.minimum(xp.maximum(a * scale + offset, low), high)
        # Round for integer spaces: the cast alone would truncate.
        x = xp.rint(x) if whole else x
        return x.reshape((*x.shape[: int(batched)], *space.shape)).astype(space.dtype)

    return decode


def rescaling(space: gym_spaces.Box) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(scale, offset, low, high), float32[size] each: the environment's action is
    `action * scale + offset`, clipped to low and high."""
    low = space.low.astype(np.float32).ravel()
    high = space.high.astype(np.float32).ravel()
    both = (space.bounded_below & space.bounded_above).ravel()
    # Halved first, because high - low may overflow.
    scale = np.where(both, _half(high) - _half(low), 1).astype(np.float32)
    offset = np.where(both, _half(high) + _half(low), 0).astype(np.float32)
    return scale, offset, low, high


def _half(bound: np.ndarray) -> np.ndarray:
    """Half of each bound, 0 where there is none, so that no infinity enters the arithmetic."""
    return np.where(np.isfinite(bound), bound, 0) * np.float32(0.5)
