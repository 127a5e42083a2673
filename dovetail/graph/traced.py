"""What tracing leaves behind: a jaxpr with boundaries in it, and the trees to read it by."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr

from dovetail.boundaries import Reach, Side
from dovetail.graph.ir import Inner, Tree


@dataclass(frozen=True, eq=False)
class UnrollSpec:
    """What an `unroll` equation carries besides its operands."""

    length: int
    act: Inner
    step: Inner
    bootstrap: Inner | None
    reset: Inner | None
    num_inputs: int
    out_avals: tuple[ShapedArray, ...]
    trajectory_tree: Tree
    initial_carry: tuple[np.ndarray, ...]
    carry_tree: Tree
    per_step_bytes: tuple[int, int]


@dataclass(frozen=True, eq=False)
class PythonSpec:
    """What a `python` equation carries besides its operands."""

    name: str
    side: Side
    function: Callable[..., Any]
    in_tree: Tree
    out_tree: Tree
    out_avals: tuple[ShapedArray, ...]
    reach: Reach | None


@dataclass(frozen=True)
class Traced:
    """One iteration as a jaxpr over flat leaves, with the trees to read them by."""

    closed: ClosedJaxpr
    state_tree: Tree
    state_sides: tuple[Side, ...]
    """Where each leaf of the state lives."""
    actor_tree: Tree
    metric_names: tuple[str, ...]
    num_envs: int
    """Environments whose steps make one update."""
    actor_envs: int
    """Environments of one actor."""
    tables: tuple[Side, ...] = ()
    """Sides whose state is divided among their copies and changed in place."""
    data: tuple[int, ...] = ()
    """Which leaves of the state are recorded steps."""
