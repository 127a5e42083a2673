"""Refuses a report with metrics or weights that are not finite."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dovetail.errors import UserError


class Diverged(UserError):
    """A metric or a weight is not finite; resuming from the last good state would not help."""


def refuse_nonfinite(
    means: Mapping[str, np.ndarray], finite: bool, updates: tuple[int, int], actor: Any
) -> None:
    """Raises `Diverged` if a metric is not finite, or if not `finite`, as the weights are.

    `updates` are the first and the last of the report; `actor` returns the actors' state, or is
    None with several seeds.
    """
    bad = next((name for name, value in means.items() if not np.isfinite(value).all()), None)
    if bad is not None:
        value = np.ravel(means[bad])
        what = f"{bad} became {float(value[~np.isfinite(value)][0])}"
    elif not finite:
        what = "a weight is no longer finite"
    else:
        return
    first, last = updates
    when = f"in update {last}" if first == last else f"between updates {first} and {last}"
    suspect = "" if actor is None else _suspect(actor())
    raise Diverged(
        f"Training diverged: {what} {when}; {suspect}try a lower "
        f"--learning-rate, a lower --max-grad-norm, or normalized observations and rewards."
    )


def _suspect(actor: Any) -> str:
    """Names a JAX environment that is not finite while others still are.

    If all environments are affected, the weights are the more likely cause.
    """
    shown = (actor.timestep.observation, actor.timestep.reward, actor.episode_return)
    rows = [np.asarray(leaf).reshape(len(leaf), -1) for leaf in jax.tree.leaves(shown)]
    bad = ~np.all([np.isfinite(row).all(axis=1) for row in rows], axis=0)
    if not bad.any() or bad.all():
        return ""
    index = int(np.flatnonzero(bad)[0])
    return (
        f"environment {index} showed a number that is not finite by step "
        f"{int(actor.step[index])}, so repair it, or "
    )
