"""Target networks."""

from typing import Any

import jax
import optax

from dovetail.keys import for_all


def soft_update(target: dict[str, Any], params: dict[str, Any], rate: float) -> dict[str, Any]:
    """(1 - rate) · target + rate · params, for every network that has a target."""
    return {name: optax.incremental_update(params[name], old, rate) for name, old in target.items()}


def random_subset(critics: Any, subset: int, key: jax.Array) -> Any:
    """`subset` of the critics stacked in [count, …], the same ones on every learner replica."""
    count = len(jax.tree.leaves(critics)[0])
    if subset == count:
        return critics
    chosen = jax.random.permutation(for_all(key), count)[:subset]
    return jax.tree.map(lambda x: x[chosen], critics)
