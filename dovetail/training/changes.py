"""Options that change when a run is resumed.

A run goes on with other options if its state keeps its meaning: step sizes, coefficients, and
everything that only concerns the job. What the state is made for, such as the sizes of networks and
buffers, cannot change; that is found by comparing the shapes of both states.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from dovetail.algorithm import Algorithm
from dovetail.errors import UserError, nearest
from dovetail.run.settings import Settings
from dovetail.training.config import options_of

FIXED = {
    "activation": "the weights were trained with it",
    "env": "the run is about it: start another with --init-from",
    "folder": "it is the run's own folder",
    "network": "the weights were trained with it",
    "num_envs": "each of its environments has a state of its own",
    "seed": "it has already decided everything random",
    "seeds": "each seed has a state of its own",
    "strategy": "the states of its workers are divided by it",
    "wrap": "the run is about the environment as it was wrapped",
}
"""Options that never change, each with the reason."""

Changed = dict[str, tuple[Any, Any]]
"""Option → (its value before, its value from now on)."""


def with_changes(
    algorithm: Algorithm, settings: Settings, given: Mapping[str, Any]
) -> tuple[Algorithm, Settings, Changed]:
    """Returns the algorithm and the settings with the given options, and what that changes."""
    options, job = options_of(algorithm), options_of(settings)
    for name in given:
        if name in FIXED:
            raise UserError(f"{_flag(name)} cannot change when a run is resumed: {FIXED[name]}.")
        if name not in options and name not in job:
            hint = nearest(name, [*options, *job])
            raise UserError(f"{type(algorithm).__name__} has no option {name!r}: {hint}")
    before = job | options
    changed = {name: (before[name], new) for name, new in given.items() if new != before[name]}
    own = {name: new for name, (_, new) in changed.items() if name in options}
    others = {name: new for name, (_, new) in changed.items() if name not in options}
    return (
        dataclasses.replace(algorithm, **own),
        dataclasses.replace(settings, **others),
        changed,
    )


def refuse_other_shapes(before: Algorithm, after: Algorithm, changed: Changed) -> None:
    """Raises if one of the changed options makes another state than the run has.

    `after` is bound to its task, and `before` has the options of the earlier start.
    """
    task, wanted = after.task, _shapes(before.bind(after.task))
    if _shapes(after) == wanted:
        return
    own = {name: new for name, (_, new) in changed.items() if name in options_of(before)}
    for name, new in own.items():
        if _shapes(dataclasses.replace(before, **{name: new}).bind(task)) != wanted:
            raise UserError(
                f"{_flag(name)} cannot change when a run is resumed: its state was made for "
                f"{changed[name][0]!r}; leave it out, or train a new run."
            )
    raise UserError(
        f"{', '.join(map(_flag, own))} cannot change together when a run is resumed: they make "
        "another state; leave some out, or train a new run."
    )


def record(changed: Changed, updates: int, env_steps: int) -> dict[str, Any]:
    """The entry of a run's config for options that changed after `updates`."""
    pairs = {name: {"before": old, "after": new} for name, (old, new) in changed.items()}
    return {"updates": updates, "env_steps": env_steps, "options": pairs}


def sentence(changed: Changed, updates: int) -> str:
    """The message about options that changed after `updates`."""
    words = [f"{name} is {new!r}, no longer {old!r}" for name, (old, new) in changed.items()]
    return f"From update {updates + 1} on, {', '.join(words)}."


def _shapes(bound: Algorithm) -> tuple[Any, list[Any]]:
    """The structure and the shapes of a bound algorithm's state and carry."""
    found = jax.eval_shape(lambda key: (bound.init(key), bound.initial_carry()), jax.random.key(0))
    return jax.tree.structure(found), [(x.shape, x.dtype) for x in jax.tree.leaves(found)]


def _flag(name: str) -> str:
    return "--run" if name == "folder" else "--" + name.replace("_", "-")
