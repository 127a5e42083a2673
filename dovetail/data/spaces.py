"""Gymnasium's spaces in a dataset: as Minari's JSON, as named columns, and as algorithms see them.

A dataset holds an environment's own observations and actions, so that others can use it; `Codec`
converts them to the arrays algorithms see (see `dovetail.envs.spaces`) and back.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from gymnasium import spaces

from dovetail.envs.interface import ActionSpace, Continuous, Discrete, EnvSpec, MultiDiscrete
from dovetail.envs.spaces import VECTOR, space_map
from dovetail.errors import UserError

Space = spaces.Space[Any]
Array = np.ndarray[Any, np.dtype[Any]]


class Column(NamedTuple):
    """One array of every episode: its path, and the dtype and shape of one row."""

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * math.prod(self.shape)


# Minari's JSON.


def to_json(space: Space) -> dict[str, Any]:
    """The space in Minari's JSON."""
    match space:
        case spaces.Box():
            bounds = {"low": space.low.tolist(), "high": space.high.tolist()}
            return {"type": "Box", "dtype": str(space.dtype), "shape": list(space.shape), **bounds}
        case spaces.Discrete():
            start, n = int(space.start), int(space.n)
            return {"type": "Discrete", "dtype": "int64", "start": start, "n": n}
        case spaces.MultiDiscrete():
            numbers = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
            return {"type": "MultiDiscrete", "dtype": str(space.dtype), **numbers}
        case spaces.MultiBinary():
            sizes = list(space.shape)
            return {"type": "MultiBinary", "n": sizes if len(sizes) > 1 else sizes[0]}
        case spaces.Dict():
            inner = {name: to_json(part) for name, part in space.spaces.items()}
            return {"type": "Dict", "subspaces": inner}
        case spaces.Tuple():
            return {"type": "Tuple", "subspaces": [to_json(part) for part in space.spaces]}
        case _:
            raise UserError(
                f"A dataset cannot hold elements of the space {type(space).__name__}: wrap the "
                "environment so that it shows Box, Discrete, MultiDiscrete, MultiBinary, or a Dict "
                "or Tuple of these."
            )


def from_json(record: Mapping[str, Any]) -> Space:
    """The space described by Minari's JSON."""
    match record:
        case {"type": "Box", "dtype": dtype, "shape": shape, "low": low, "high": high}:
            kind = np.dtype(dtype)
            bounds = [np.array(bound, kind) for bound in (low, high)]
            return spaces.Box(bounds[0], bounds[1], tuple(shape), kind.type)
        case {"type": "Discrete", "n": n}:
            return spaces.Discrete(n, start=record.get("start", 0))
        case {"type": "MultiDiscrete", "nvec": nvec}:
            dtype = np.dtype(record.get("dtype", "int64"))
            start = np.array(record.get("start", np.zeros_like(nvec)))
            return spaces.MultiDiscrete(np.array(nvec), dtype.type, start=start)
        case {"type": "MultiBinary", "n": n}:
            return spaces.MultiBinary(n)
        case {"type": "Dict", "subspaces": inner}:
            return spaces.Dict({name: from_json(part) for name, part in inner.items()})
        case {"type": "Tuple", "subspaces": inner}:
            return spaces.Tuple([from_json(part) for part in inner])
        case _:
            raise UserError(f"A dataset with elements of the space {record} cannot be read here.")


def same(a: Space, b: Space) -> bool:
    """Whether elements of both can be stored in one dataset."""
    return json.dumps(to_json(a)) == json.dumps(to_json(b))


def is_image(space: Space) -> bool:
    """Whether Minari may have stored the elements as JPEG."""
    return (
        isinstance(space, spaces.Box)
        and len(space.shape) in (2, 3)
        and min(space.shape[:2]) >= 32
        and space.dtype == np.uint8
        and bool(np.all(space.low == 0) and np.all(space.high == 255))
    )


# Columns.


def leaves(space: Space, path: str) -> Iterator[tuple[str, Space]]:
    """The arrays of an element, each with its path; entries of a tuple are `_index_0`, …."""
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            yield from leaves(part, f"{path}/{name}")
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from leaves(part, f"{path}/_index_{index}")
    else:
        yield path, space


def columns(space: Space, path: str) -> Iterator[Column]:
    """The columns that store elements of a space."""
    for place, leaf in leaves(space, path):
        yield Column(place, np.dtype(leaf.dtype), leaf.shape or ())


def flatten(space: Space, tree: Any, path: str) -> dict[str, Array]:
    """A tree of elements [n, …] as columns, in the space's dtypes."""
    if isinstance(space, spaces.Dict):
        parts = [flatten(part, tree[name], f"{path}/{name}") for name, part in space.spaces.items()]
    elif isinstance(space, spaces.Tuple):
        parts = [
            flatten(part, tree[index], f"{path}/_index_{index}")
            for index, part in enumerate(space.spaces)
        ]
    else:
        return {path: np.ascontiguousarray(tree, space.dtype)}
    return {name: column for part in parts for name, column in part.items()}


def unflatten(space: Space, arrays: Mapping[str, Array], path: str) -> Any:
    """The tree with these columns."""
    if isinstance(space, spaces.Dict):
        return {n: unflatten(part, arrays, f"{path}/{n}") for n, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(
            unflatten(part, arrays, f"{path}/_index_{index}")
            for index, part in enumerate(space.spaces)
        )
    return arrays[path]


# The algorithm's view.


class Codec:
    """Converts observations and actions [n, …] between the environment and algorithms."""

    def __init__(self, observation: Space, action: Space, name: str) -> None:
        """`name` identifies the environment in messages."""
        self._map = space_map(observation, action, name)
        self._observation, self._action = observation, action

    @property
    def observation(self) -> Any:
        """The observations algorithms see, as in `EnvSpec`."""
        return self._map.observation

    @property
    def action(self) -> ActionSpace:
        """The actions algorithms choose from."""
        return self._map.action

    @property
    def bounds(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Bounds of continuous actions, as in `EnvSpec`."""
        return self._map.bounds

    def observations(self, own: Any) -> Any:
        """The environment's observations as algorithms see them."""
        return self._map.encode(own)

    def actions(self, own: Any) -> Array:
        """The environment's actions in the algorithm's format: bounded ones in [-1, 1]."""
        space, own = self._action, np.asarray(own)
        if isinstance(space, spaces.Discrete):
            return (own - int(space.start)).astype(np.int32)
        if isinstance(space, spaces.MultiDiscrete):
            return (own - space.start).reshape(len(own), -1).astype(np.int32)
        if isinstance(space, spaces.MultiBinary):
            return own.reshape(len(own), -1).astype(np.int32)
        assert isinstance(space, spaces.Box)
        both = (space.bounded_below & space.bounded_above).ravel()
        low = np.where(both, space.low.ravel(), -1.0).astype(np.float64)
        high = np.where(both, space.high.ravel(), 1.0).astype(np.float64)
        # Equal bounds would divide by zero.
        half = np.where(high > low, (high - low) / 2, 1.0)
        flat = own.reshape(len(own), -1)
        return ((flat - (high + low) / 2) / half).astype(np.float32)

    def own_observations(self, seen: Any) -> Any:
        """The environment's observations, from those algorithms saw."""
        space = self._observation
        if not isinstance(space, spaces.Dict | spaces.Tuple):
            return _own(space, np.asarray(seen))
        joined = seen.get(VECTOR, ()) if isinstance(seen, Mapping) else seen
        rest = _Vector(np.asarray(joined))
        return _own_tree(space, (), seen, rest)

    def own_actions(self, given: Any) -> Any:
        """The environment's actions, from those algorithms gave: clipped to the bounds."""
        return np.asarray(self._map.decode(np.asarray(given)))


class _Vector:
    """The concatenated part of an observation, consumed from the left."""

    def __init__(self, joined: Array) -> None:
        self._joined, self._at = joined, 0

    def take(self, size: int) -> Array:
        self._at += size
        return self._joined[:, self._at - size : self._at]


def _own_tree(space: Space, path: tuple[str, ...], seen: Any, rest: _Vector) -> Any:
    """The element of a nested space, from the leaves and the vector that were seen."""
    if isinstance(space, spaces.Dict):
        found = {
            # In the order in which the vector was concatenated: by key.
            n: _own_tree(space.spaces[n], (*path, n), seen, rest)
            for n in sorted(space.spaces)
        }
        return {name: found[name] for name in space.spaces}
    if isinstance(space, spaces.Tuple):
        return tuple(
            _own_tree(part, (*path, str(index)), seen, rest)
            for index, part in enumerate(space.spaces)
        )
    if isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) >= 2:
        return np.asarray(seen[".".join(path)])
    return _own(space, rest.take(_width(space)))


def _width(space: Space) -> int:
    """Number of entries of one element in the concatenated vector."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    return math.prod(space.shape or ())


def _own(space: Space, seen: Array) -> Array:
    """Elements [n, …] of a space that is a single array."""
    if isinstance(space, spaces.Discrete):
        # Algorithms see choices one-hot.
        return seen.argmax(axis=-1) + space.start
    if isinstance(space, spaces.MultiDiscrete):
        counts = space.nvec.ravel()
        parts = np.split(seen, np.cumsum(counts)[:-1], axis=-1)
        chosen = np.stack([part.argmax(axis=-1) for part in parts], axis=-1)
        return chosen.reshape(len(seen), *space.shape) + space.start
    return seen.reshape(len(seen), *(space.shape or ())).astype(space.dtype)


def raw_spaces(spec: EnvSpec) -> tuple[Space, Space]:
    """(observation, action): the environment's own spaces; those that algorithms see for a
    `JaxEnv`, which takes and shows just that."""
    return spec.spaces or (_shown(spec.observation), _taken(spec.action))


def spaces_of(spec: EnvSpec) -> tuple[Space, Space]:
    """(observation, action): spaces of the environment as algorithms see it, for when its own are
    unknown; actions have the environment's own bounds if these are known."""
    if spec.bounds is not None:
        low, high = (np.array(bound, np.float32) for bound in spec.bounds)
        return _shown(spec.observation), spaces.Box(low, high)
    return _shown(spec.observation), _taken(spec.action)


def _shown(tree: Any) -> Space:
    if isinstance(tree, Mapping):
        return spaces.Dict({name: _shown(part) for name, part in tree.items()})
    assert isinstance(tree, jax.ShapeDtypeStruct)
    if tree.dtype == np.uint8:
        return spaces.Box(0, 255, tree.shape, np.uint8)
    return spaces.Box(-np.inf, np.inf, tree.shape, np.float32)


def _taken(action: ActionSpace) -> Space:
    """The space of actions as algorithms choose them."""
    match action:
        case Discrete(n):
            return spaces.Discrete(n)
        case MultiDiscrete(nvec):
            return spaces.MultiDiscrete(np.array(nvec))
        case Continuous(size, bounded):
            bound = 1.0 if bounded else np.inf
            return spaces.Box(-bound, bound, (size,), np.float32)
