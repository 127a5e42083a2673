"""The spaces of an exported policy as JSON, and the two maps between them and its arrays.

`encoding` says how the arrays of an observation become the policy's input, `decoding` how its
output becomes an action of the environment. Both describe what `dovetail.envs.spaces` does, for
readers that do not have Dovetail.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from dovetail.data.spaces import Space, from_json, to_json
from dovetail.envs.spaces import rescaling

Record = dict[str, Any]
Path = tuple[str | int, ...]


def space_to_json(space: Space) -> Record:
    """The space as JSON: bounds that are all equal as one number, infinite ones as null."""
    record = to_json(space)
    if "subspaces" in record and isinstance(space, spaces.Dict):
        return record | {"subspaces": {k: space_to_json(v) for k, v in space.spaces.items()}}
    if "subspaces" in record and isinstance(space, spaces.Tuple):
        return record | {"subspaces": [space_to_json(part) for part in space.spaces]}
    if isinstance(space, spaces.Box):
        return record | {"low": _bounds(space.low), "high": _bounds(space.high)}
    return record


def space_from_json(record: Mapping[str, Any]) -> Space:
    """The space that `space_to_json` described."""
    match record:
        case {"type": "Dict", "subspaces": inner}:
            return spaces.Dict({name: space_from_json(part) for name, part in inner.items()})
        case {"type": "Tuple", "subspaces": inner}:
            return spaces.Tuple([space_from_json(part) for part in inner])
        case {"type": "Box", "low": low, "high": high, "shape": shape}:
            ends = {"low": _bound(low, shape, -np.inf), "high": _bound(high, shape, np.inf)}
            return from_json({**record, **ends})
        case _:
            return from_json(record)


def encoding(space: Space) -> list[Record]:
    """The arrays of an observation, in the order in which the policy takes them.

    An image (uint8, two or more axes) is an input of its own. The others are flattened, one-hot
    where they are choices, and joined into one vector; an observation of a single array keeps its
    shape.
    """
    return [_part(path, leaf) for path, leaf in leaves(space)]


def decoding(space: Space) -> Record:
    """How the policy's output becomes an action of the environment."""
    if isinstance(space, spaces.Box):
        names = ("scale", "offset", "low", "high")
        numbers = {n: _bounds(x, whole=False) for n, x in zip(names, rescaling(space), strict=True)}
        whole = bool(np.issubdtype(space.dtype, np.integer))
        shape = list(space.shape)
        return {"kind": "rescale", **numbers, "round": whole, "shape": shape, **_dtype(space)}
    start: Any = getattr(space, "start", 0)
    shape = list(space.shape or ())
    return {"kind": "choice", "start": np.asarray(start).tolist(), "shape": shape, **_dtype(space)}


def leaves(space: Space, path: Path = ()) -> Iterator[tuple[Path, Space]]:
    """The spaces of an observation's arrays with their paths: keys sorted, entries in order."""
    if isinstance(space, spaces.Dict):
        for key in sorted(space.spaces):
            yield from leaves(space.spaces[key], (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, entry in enumerate(space.spaces):
            yield from leaves(entry, (*path, index))
    else:
        yield path, space


def short(space: Space) -> str:
    """The space in a few words: `Box(84, 84, 4) uint8`, `Discrete(2)`."""
    if isinstance(space, spaces.Dict):
        return f"Dict({', '.join(f'{key}: {short(part)}' for key, part in space.spaces.items())})"
    if isinstance(space, spaces.Tuple):
        return f"Tuple({', '.join(map(short, space.spaces))})"
    if isinstance(space, spaces.Box):
        return f"Box{space.shape} {space.dtype}"
    return str(space)


def _part(path: Path, leaf: Space) -> Record:
    shape = list(leaf.shape or ())
    if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete):
        several = isinstance(leaf, spaces.MultiDiscrete)
        counts = leaf.nvec.ravel().tolist() if several else [int(leaf.n)]
        start = np.ravel(leaf.start).tolist()
        return {"path": list(path), "kind": "one-hot", "counts": counts, "start": start}
    image = leaf.dtype == np.uint8 and len(shape) >= 2 and isinstance(leaf, spaces.Box)
    return {"path": list(path), "kind": "image" if image else "numbers", "shape": shape}


def _dtype(space: Space) -> Record:
    return {"dtype": str(space.dtype)}


def _bounds(array: np.ndarray, whole: bool = True) -> Any:
    """The numbers of an array, null where infinite; with `whole`, one number if all are equal."""
    if whole and array.size and np.all(array == array.flat[0]):
        array = np.asarray(array.flat[0])
    plain = array.astype(object)
    plain[~np.isfinite(array)] = None
    return plain.tolist()


def _bound(found: Any, shape: list[int], missing: float) -> list[Any]:
    """The bounds of every entry, with `missing` where there is none."""
    array = np.array(found, object)
    array = np.where(array == None, missing, array)  # noqa: E711 (entry by entry)
    return np.broadcast_to(array, tuple(shape)).tolist()
