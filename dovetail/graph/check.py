"""Checks of an algorithm's results during tracing, each with an error sentence.

States and carries are loop-carried, so their structure, shapes and dtypes must not change. Sides
are checked in `sides.py`, and the position of boundaries in `trace.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from dovetail.algorithm import Algorithm
from dovetail.boundaries import At
from dovetail.envs.interface import Continuous, Discrete, EnvSpec, MultiDiscrete
from dovetail.errors import UserError, defined_at

ACT = ("action", "extras", "carry")
GREEDY = ("action", "carry")
"""The results of `act` and `greedy`."""


def results(
    algorithm: Algorithm, name: str, function: Any, made: Any, wanted: tuple[str, ...]
) -> Any:
    """Checks that the method `name`, or the `function` in its place, returned as many results as
    are `wanted`."""
    if isinstance(made, tuple) and len(made) == len(wanted):
        return made
    found = f"{len(made)} results" if isinstance(made, tuple) else _kind(made)
    raise UserError(
        f"{defined_at(function)}{type(algorithm).__name__}.{name} must return "
        f"({', '.join(wanted)}), but returned {found}."
    )


def two_results(algorithm: Algorithm, result: Any) -> tuple[Any, dict[str, Any]]:
    """Checks that `iteration` returned (state, metrics)."""
    results(algorithm, "iteration", algorithm.iteration, result, ("state", "metrics"))
    if not isinstance(result[1], dict):
        raise UserError(
            f"{defined_at(algorithm.iteration)}{type(algorithm).__name__}.iteration must return "
            f"(state, metrics) with metrics a dict of scalars, but its metrics are "
            f"{_kind(result[1])}."
        )
    return result


def _kind(made: Any) -> str:
    return "nothing" if made is None else f"a {type(made).__name__}"


def check_state(algorithm: Algorithm, before: Any, after: Any) -> None:
    """Checks that the new state has the structure, shapes and dtypes of the old one."""
    name = f"{defined_at(algorithm.iteration)}{type(algorithm).__name__}"
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise UserError(f"{name}.iteration {_difference('state', 'init', before, after)}.")
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        shape, dtype = jnp.shape(new), jax.dtypes.result_type(new)
        if (old.shape, old.dtype) != (shape, dtype):
            raise UserError(
                f"{name}.iteration changes state{jax.tree_util.keystr(path)} from "
                f"{old.dtype}{list(old.shape)} to {dtype}{list(shape)}; keep its shape and dtype."
            )


def _difference(what: str, made_by: str, before: Any, after: Any) -> str:
    """How the structure of a returned tree differs from the one that `made_by` made."""
    was, now = _marks(before), _marks(after)
    for path in [*was, *now]:
        old, new = was.get(path), now.get(path)
        if old != new and new is None:
            return (
                f"returns {what}{path} without the mark of {made_by}, for the side {old!r}: return "
                f"dt.at({old!r}, …)"
            )
        if old != new:
            there = f"for the side {old!r}" if old else "without a mark"
            return (
                f"returns {what}{path} marked for the side {new!r}, but {made_by} makes it {there}:"
                f" mark it alike in both"
            )
    there, here = _paths(before), _paths(after)
    if gone := next((path for path in there if path not in here), None):
        return f"returns no {what}{gone}, which {made_by} makes"
    if new := next((path for path in here if path not in there), None):
        return f"returns {what}{new}, which {made_by} does not make"
    kinds = type(after).__name__, type(before).__name__
    other = f"a {kinds[0]} where {made_by} makes a {kinds[1]}"
    return f"returns as {what} " + (other if kinds[0] != kinds[1] else "other containers inside")


def _marks(tree: Any) -> dict[str, str]:
    """The sides of the marked parts of a tree, by path."""
    parts = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda part: isinstance(part, At))
    return {jax.tree_util.keystr(path): part.side for path, part in parts if isinstance(part, At)}


def _paths(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def same_carry(algorithm: Algorithm, name: str, function: Any, before: Any, after: Any) -> Any:
    """Checks a returned carry against the one passed in and casts it to the same dtypes."""
    name = f"{defined_at(function)}{type(algorithm).__name__}.{name}"
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise UserError(f"{name} {_difference('carry', 'initial_carry', before, after)}.")
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        if old.shape != new.shape:
            raise UserError(
                f"{name} changes carry{jax.tree_util.keystr(path)} from shape "
                f"{list(old.shape[1:])} to {list(new.shape[1:])}; keep its shape."
            )
    # A scan needs the same dtypes in and out.
    return jax.tree.map(lambda old, new: new.astype(old.dtype), before, after)


def check_batch(algorithm: Algorithm, name: str, function: Any, size: int, made: Any) -> None:
    """Checks that every leaf of (action, extras) is [size, …]: a row per environment."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(made):
        if not jnp.ndim(leaf) or leaf.shape[0] != size:
            what = ("action", "extras")[path[0].idx] + jax.tree_util.keystr(path[1:])
            raise UserError(
                f"{defined_at(function)}{type(algorithm).__name__}.{name} "
                f"returns {what} of shape "
                f"{list(jnp.shape(leaf))} for {size} environments: return [{size}, …], a row for "
                f"each."
            )


def check_bootstrap(algorithm: Algorithm, function: Any, made: Any) -> None:
    """Checks that the bootstrap of an unroll returned something, given the structure of it."""
    if made is None or not made.num_leaves:
        name = getattr(function, "__name__", "bootstrap")
        raise UserError(
            f"{defined_at(function)}{type(algorithm).__name__}.{name}, the bootstrap of rl.unroll, "
            f"must return a value for each environment, but returned nothing."
        )


def check_action(
    algorithm: Algorithm, name: str, function: Any, spec: EnvSpec, action: Any
) -> None:
    """Checks a batch of actions [B, …], made by the method `name`, against the action space."""
    match spec.action:
        case Discrete():
            wanted, kind = (), jnp.integer
        case MultiDiscrete(nvec):
            wanted, kind = (len(nvec),), jnp.integer
        case Continuous(size):
            wanted, kind = (size,), jnp.floating
    leaves = jax.tree.leaves(action)
    fits = [x.shape[1:] == wanted and jnp.issubdtype(x.dtype, kind) for x in leaves]
    if fits != [True]:
        found = " and ".join(f"{x.dtype}{list(x.shape[1:])}" for x in leaves) or "nothing"
        number = "a whole number" if kind is jnp.integer else "a float"
        raise UserError(
            f"{defined_at(function)}{type(algorithm).__name__}.{name} "
            f"returns the action {found}, but {spec.id} takes {spec.action}: "
            f"{number} of shape {list(wanted)}."
        )


def scalar(name: str, value: Any) -> jax.Array:
    """Converts a metric to float32[]."""
    try:
        array = jnp.asarray(value, jnp.float32)
    except (TypeError, ValueError):
        raise UserError(
            f"metric {name!r} is {value!r}; metrics are scalars, each a number."
        ) from None
    if array.shape != ():
        raise UserError(
            f"metric {name!r} has shape {list(array.shape)}; metrics are scalars: reduce it, "
            f"for instance with .mean()."
        )
    return array
