"""What tracing leaves behind: a jaxpr with boundaries in it, and the trees to read it by."""

from dataclasses import dataclass

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr

from dovetail.graph.ir import Inner, Side, Tree


@dataclass(frozen=True, eq=False)
class UnrollSpec:
    """What an `unroll` equation carries besides its operands."""

    length: int
    act: Inner
    step: Inner
    bootstrap: Inner | None
    num_inputs: int
    out_avals: tuple[ShapedArray, ...]
    trajectory_tree: Tree
    initial_carry: tuple[np.ndarray, ...]
    carry_tree: Tree
    per_step_bytes: tuple[int, int]


@dataclass(frozen=True)
class Traced:
    """One iteration as a jaxpr over flat leaves, with the trees to read them by."""

    closed: ClosedJaxpr
    state_tree: Tree
    state_sides: tuple[Side, ...]
    """Where each leaf of the state lives: with the learner, or in its replay."""
    actor_tree: Tree
    metric_names: tuple[str, ...]
    pieces: int
    """How many actors' results the learner joins in one update."""
    shards: int = 1
    """How many equal parts a replay has; its side's values are one part's."""
    data: tuple[int, ...] = ()
    """Which leaves of the state are recorded steps."""
