"""Acting on a whole batch, natively or by mapping the function for one environment.

A decoder with a KV cache or a tree search is written for a whole batch, as `act_batch` and
`greedy_batch`. Where an algorithm defines one of these, it runs instead of the mapped `act` or
`greedy`.
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
    """Marks a function as written for a whole batch, so that `rl.unroll` does not map it.

    `act_batch` and `greedy_batch` are recognized by name and need no mark.
    """

    # A wrapper carries the mark: a bound method does not accept attributes.
    @wraps(function)
    def whole(*args: Any) -> Any:
        return function(*args)

    setattr(whole, _MARK, True)
    return whole


def takes_batch(function: Function) -> bool:
    """Whether a function is written for a whole batch."""
    return getattr(function, _MARK, False) or getattr(function, "__name__", "") in _NAMES


def defines(algorithm: Algorithm, name: str) -> bool:
    """Whether an algorithm overrides a method of `Algorithm`."""
    return getattr(type(algorithm), name) is not getattr(Algorithm, name)


def _depth(algorithm: Algorithm, name: str) -> int:
    """Position in the MRO of the class that defines a method; 0 is the algorithm's own class."""
    return next(i for i, kind in enumerate(type(algorithm).__mro__) if name in vars(kind))


def _native(algorithm: Algorithm, name: str) -> bool:
    """Whether `<name>_batch` takes precedence over `name`.

    It does not if a subclass overrides only `name`: the inherited batch version would ignore the
    override.
    """
    batch = f"{name}_batch"
    newer = _depth(algorithm, batch) <= _depth(algorithm, name)
    return defines(algorithm, batch) and newer


def preferred(algorithm: Algorithm, act: Function) -> Function:
    """Returns `act_batch` if `act` is the algorithm's own and has a batch version; else `act`."""
    own = getattr(act, "__func__", None) is type(algorithm).act
    return algorithm.act_batch if own and _native(algorithm, "act") else act


def over_batch(function: Function) -> Function:
    """Returns `function(params, …)` for arguments [B, …], mapped unless it takes a batch already.

    `params` are shared by the whole batch.
    """
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
    """`act_on_batch` for one environment, without the batch axis."""
    native = preferred(algorithm, algorithm.act) == algorithm.act_batch
    return _for_one(algorithm.act_batch) if native else algorithm.act


def greedy_for_one(algorithm: Algorithm) -> Function:
    """`greedy_on_batch` for one environment, without the batch axis."""
    whole = greedy_on_batch(algorithm)
    return _for_one(whole) if _native(algorithm, "greedy") else algorithm.greedy


def _for_one(function: Function) -> Function:
    """Calls a batch `function` with a batch of one."""

    def one(params: Params, *row: Any) -> Any:
        alone = jax.tree.map(lambda x: jnp.asarray(x)[None], row)
        return jax.tree.map(lambda x: x[0], function(params, *alone))

    return one
