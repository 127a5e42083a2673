"""Checks of an algorithm's results during tracing, each with an error sentence.

States and carries are loop-carried, so their structure, shapes and dtypes must not change. Sides
are checked in `sides.py`, and the position of boundaries in `trace.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from dovetail.algorithm import Algorithm
from dovetail.envs.interface import Continuous, Discrete, EnvSpec, MultiDiscrete
from dovetail.errors import UserError


def two_results(algorithm: Algorithm, result: Any) -> tuple[Any, dict[str, Any]]:
    """Checks that `iteration` returned (state, metrics)."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise UserError(
            f"{type(algorithm).__name__}.iteration must return (state, metrics) with metrics a "
            f"dict of scalars, got {type(result).__name__}."
        )
    return result


def check_state(algorithm: Algorithm, before: Any, after: Any) -> None:
    """Checks that the new state has the structure, shapes and dtypes of the old one."""
    name = type(algorithm).__name__
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise UserError(
            f"{name}.iteration returns a state of another structure than {name}.init made: "
            f"{jax.tree.structure(after)} instead of {jax.tree.structure(before)}."
        )
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        shape, dtype = jnp.shape(new), jax.dtypes.result_type(new)
        if (old.shape, old.dtype) != (shape, dtype):
            raise UserError(
                f"{name}.iteration changes state{jax.tree_util.keystr(path)} from "
                f"{old.dtype}{list(old.shape)} to {dtype}{list(shape)}; keep its shape and dtype."
            )


def same_carry(algorithm: Algorithm, function: str, before: Any, after: Any) -> Any:
    """Checks a returned carry against the one passed in and casts it to the same dtypes."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise UserError(
            f"{type(algorithm).__name__}.{function} returns a carry of structure "
            f"{jax.tree.structure(after)}, but initial_carry() has {jax.tree.structure(before)}."
        )
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        if old.shape != new.shape:
            raise UserError(
                f"{type(algorithm).__name__}.{function} changes carry{jax.tree_util.keystr(path)} "
                f"from shape {list(old.shape[1:])} to {list(new.shape[1:])}; keep its shape."
            )
    # A scan needs the same dtypes in and out.
    return jax.tree.map(lambda old, new: new.astype(old.dtype), before, after)


def check_batch(algorithm: Algorithm, function: str, size: int, made: Any) -> None:
    """Checks that every leaf of (action, extras) is [size, …]: a row per environment."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(made):
        if not jnp.ndim(leaf) or leaf.shape[0] != size:
            what = ("action", "extras")[path[0].idx] + jax.tree_util.keystr(path[1:])
            raise UserError(
                f"{type(algorithm).__name__}.{function} returns {what} of shape "
                f"{list(jnp.shape(leaf))} for {size} environments: return [{size}, …], a row for "
                f"each."
            )


def check_action(algorithm: Algorithm, spec: EnvSpec, action: Any) -> None:
    """Checks a batch of actions [B, …] against the environment's action space."""
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
            f"{type(algorithm).__name__}.act returns the action {found}, but {spec.id} takes "
            f"{spec.action}: {number} of shape {list(wanted)}."
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
