"""The result of tracing: a jaxpr with boundaries in it, and its pytree structures."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr

from dovetail.boundaries import Reach, Side
from dovetail.graph.ir import Inner, Tree
from dovetail.graph.unroll import ActorState
from dovetail.trajectory import Trajectory


@dataclass(frozen=True, eq=False)
class UnrollSpec:
    """The parameters of an `unroll` equation; see `ir.Unroll`."""

    length: int
    act: Inner
    step: Inner
    bootstrap: Inner | None
    reset: Inner | None
    num_inputs: int
    out_avals: tuple[ShapedArray, ...]
    trajectory_tree: Tree[Trajectory]
    initial_carry: tuple[np.ndarray, ...]
    carry_tree: Tree[object]
    per_step_bytes: tuple[int, int]


@dataclass(frozen=True, eq=False)
class PythonSpec:
    """The parameters of a `python` equation; see `ir.Python`."""

    name: str
    side: Side
    function: Callable[..., object]
    in_tree: Tree[tuple[object, ...]]
    out_tree: Tree[object]
    out_avals: tuple[ShapedArray, ...]
    reach: Reach | None


@dataclass(frozen=True)
class Traced:
    """One iteration as a jaxpr over flat leaves, with the structures of its inputs and outputs."""

    closed: ClosedJaxpr
    state_tree: Tree[object]
    state_sides: tuple[Side, ...]
    """The side of each leaf of the state."""
    actor_tree: Tree[ActorState]
    metric_names: tuple[str, ...]
    num_envs: int
    """Number of environments that feed one update."""
    actor_envs: int
    """Number of environments per actor."""
    tables: tuple[Side, ...] = ()
    """Sides whose state is split among their copies and updated in place."""
    data: tuple[int, ...] = ()
    """Positions of the state leaves that hold recorded steps."""
