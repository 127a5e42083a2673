"""What tracing leaves behind: a jaxpr with boundaries in it, and the trees to read it by."""

from dataclasses import dataclass

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.tree_util import PyTreeDef

from dovetail.graph.ir import Inner


@dataclass(frozen=True, eq=False)
class UnrollSpec:
    """What an `unroll` equation carries besides its operands."""

    length: int
    act: Inner
    step: Inner
    bootstrap: Inner | None
    num_inputs: int
    out_avals: tuple[jax.core.ShapedArray, ...]
    trajectory_tree: PyTreeDef
    initial_carry: tuple[np.ndarray, ...]
    carry_tree: PyTreeDef
    per_step_bytes: tuple[int, int]


@dataclass(frozen=True)
class Traced:
    """One iteration as a jaxpr over flat leaves, with the trees to read them by."""

    closed: ClosedJaxpr
    state_tree: PyTreeDef
    actor_tree: PyTreeDef
    metric_names: tuple[str, ...]
