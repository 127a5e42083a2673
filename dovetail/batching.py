"""Acting on a whole batch: as an algorithm does it natively, or by mapping what it does for one.

A decoder with its cache or a tree search is written for a batch: `act_batch` and `greedy_batch`.
Where an algorithm defines one of these, it is what runs, and `act` or `greedy` is not mapped.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.algorithm import Algorithm, Params
from dovetail.errors import UserError

Function = Callable[..., Any]

_MARK = "takes_a_batch"
_NAMES = ("act_batch", "greedy_batch")


def batched(function: Function) -> Function:
    """Marks a function as written for a whole batch: `rl.unroll` does not map it.

    `act_batch` and `greedy_batch` need no mark: they are known by their names.
    """

    @wraps(function)
    def whole(*args: Any) -> Any:
        return function(*args)

    setattr(whole, _MARK, True)
    return whole


def takes_batch(function: Function) -> bool:
    """Whether a function is written for a whole batch."""
    return getattr(function, _MARK, False) or getattr(function, "__name__", "") in _NAMES


def defines(algorithm: Algorithm, name: str) -> bool:
    """Whether an algorithm has a method of its own in the place of `Algorithm`'s."""
    return getattr(type(algorithm), name) is not getattr(Algorithm, name)


def _depth(algorithm: Algorithm, name: str) -> int:
    """How far up its classes a method is defined: 0 in its own."""
    return next(i for i, kind in enumerate(type(algorithm).__mro__) if name in vars(kind))


def _native(algorithm: Algorithm, name: str) -> bool:
    """Whether `<name>_batch` goes before `name`. A subclass that overrides only the latter means
    it: what it inherits for a batch does something else."""
    batch = f"{name}_batch"
    newer = _depth(algorithm, batch) <= _depth(algorithm, name)
    return defines(algorithm, batch) and newer


def preferred(algorithm: Algorithm, act: Function) -> Function:
    """`act_batch` in the place of the algorithm's own `act`, if it has both; else `act` itself."""
    own = getattr(act, "__func__", None) is type(algorithm).act
    return algorithm.act_batch if own and _native(algorithm, "act") else act


def over_batch(function: Function) -> Function:
    """`function(params, …)` of arguments [B, …]: itself, or mapped if it is written for one."""
    if takes_batch(function):
        return function
    return lambda params, *rows: jax.vmap(lambda *row: function(params, *row))(*rows)


def act_on_batch(algorithm: Algorithm) -> Function:
    """(params, carry, timestep, keys) → (action, extras, carry), every leaf [B, …]."""
    return over_batch(preferred(algorithm, algorithm.act))


def greedy_on_batch(algorithm: Algorithm) -> Function:
    """(params, carry, timestep) → (action, carry), every leaf [B, …]."""
    if not (defines(algorithm, "greedy_batch") or defines(algorithm, "greedy")):
        name = type(algorithm).__name__
        raise UserError(
            f"{name} defines neither greedy nor greedy_batch, by which it is evaluated and "
            f"exported: define one of them, or evaluate it as it explores (--explore)."
        )
    native = _native(algorithm, "greedy")
    return over_batch(algorithm.greedy_batch if native else algorithm.greedy)


def act_for_one(algorithm: Algorithm) -> Function:
    """What `act_on_batch` does, for one environment."""
    native = preferred(algorithm, algorithm.act) == algorithm.act_batch
    return _for_one(algorithm.act_batch) if native else algorithm.act


def greedy_for_one(algorithm: Algorithm) -> Function:
    """What `greedy_on_batch` does, for one environment."""
    whole = greedy_on_batch(algorithm)
    return _for_one(whole) if _native(algorithm, "greedy") else algorithm.greedy


def _for_one(function: Function) -> Function:
    """`function` on a batch of one."""

    def one(params: Params, *row: Any) -> Any:
        alone = jax.tree.map(lambda x: jnp.asarray(x)[None], row)
        return jax.tree.map(lambda x: x[0], function(params, *alone))

    return one
