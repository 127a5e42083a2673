"""Taps: a pass over a graph that exposes more of an iteration than its metrics.

A tap marks leaves of the unroll as read, adds an edge that carries them to the home side, and adds
a fragment there that outputs them. Strategies place this fragment like any other, so every runtime
delivers the values without changes to the algorithm or its state.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from dovetail.boundaries import BATCH_AXIS, How
from dovetail.errors import UserError
from dovetail.graph.ir import Arrival, Edge, Fragment, Graph, Tap, Unroll, Value
from dovetail.trajectory import Trajectory

RECORD = "record"
"""The name of the boundary that carries tapped values."""

Wanted = Callable[[Trajectory], Any]
"""Selects the leaves to tap: maps the trajectory to any pytree of its leaves."""


class CannotTap(UserError):
    """The graph cannot be tapped under any strategy."""


def tap(graph: Graph, wanted: Wanted) -> Graph:
    """Adds a tap of the `wanted` trajectory leaves to a graph."""
    unroll = _only_unroll(graph)
    trajectory: Trajectory = unroll.trajectory_tree.unflatten(unroll.trajectory)
    asked, tree = jax.tree.flatten(wanted(trajectory))
    values: tuple[Value, ...] = tuple(asked)
    shown = _shown(graph, unroll, values)
    read = {value.id for value in values}
    leaves = zip(unroll.trajectory, unroll.live, strict=True)
    marked = replace(unroll, live=tuple(live or value.id in read for value, live in leaves))
    ends = unroll.side, graph.home
    edge = Edge(RECORD, unroll.name, (shown.name,), *ends, How.JOIN, values, where="")
    return replace(
        graph,
        nodes=(*(marked if node is unroll else node for node in graph.nodes), shown),
        edges=(*graph.edges, edge),
        tap=Tap(tree, shown.outputs),
    )


def _only_unroll(graph: Graph) -> Unroll:
    """The unroll of the iteration; raises `CannotTap` unless there is exactly one."""
    if not graph.unrolls:
        raise CannotTap(
            f"{graph.algorithm} does not unroll, so there is nothing to --record: leave it out."
        )
    first, *others = graph.unrolls
    if others:
        raise CannotTap(
            f"{graph.algorithm} unrolls {len(graph.unrolls)} times in an iteration, and --record "
            "takes what is unrolled once: leave it out."
        )
    return first


def _shown(graph: Graph, unroll: Unroll, values: tuple[Value, ...]) -> Fragment:
    """The home-side fragment that outputs the joined values of all acting copies."""
    copies = graph.num_envs // graph.actor_envs
    joined = [jax.ShapeDtypeStruct(_joined(v.shape, copies), v.dtype) for v in values]
    # The barrier forces a copy: without it the outputs would alias buffers of the next unroll.
    program = jax.make_jaxpr(lambda *leaves: jax.lax.optimization_barrier(leaves))(*joined)
    known = [v.id for node in graph.nodes for v in (*node.inputs, *node.outputs)]
    # Numbers beyond all that exist: values of a graph are identified by their number.
    first = 1 + max([*known, *(value.id for value in graph.state.inputs)])
    made = tuple(
        Value(first + i, tuple(leaf.shape), np.dtype(leaf.dtype), graph.home)
        for i, leaf in enumerate(joined)
    )
    arrival = Arrival(RECORD, unroll.side, How.JOIN)
    name, arrivals = f"{graph.home}.{RECORD}", (arrival,) * len(values)
    return Fragment(name, graph.home, program, values, arrivals, made, flops=0, means=0)


def _joined(shape: tuple[int, ...], copies: int) -> tuple[int, ...]:
    """The shape after joining equal parts from `copies` copies along the batch axis."""
    return (*shape[:BATCH_AXIS], shape[BATCH_AXIS] * copies, *shape[BATCH_AXIS + 1 :])
