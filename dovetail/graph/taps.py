"""Taps: a pass over a graph that shows more of an iteration than its metrics.

A tap marks leaves of the unroll as read, adds an edge that carries them to the home side, and there
a fragment that gives them out. Strategies place that fragment as any other of the home side, so
every runtime carries the values, and neither the algorithm nor its state knows of it.
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
"""The boundary of what is recorded."""

Wanted = Callable[[Trajectory], Any]
"""Which leaves of a trajectory are asked for: from the whole of it to any pytree of its leaves."""


class CannotTap(UserError):
    """A graph of which nothing can be shown, whatever the strategy."""


def tap(graph: Graph, wanted: Wanted) -> Graph:
    """The same graph, which also shows what is `wanted` of its unroll."""
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
    """The fragment on the home side that gives out values of all acting copies."""
    copies = graph.num_envs // graph.actor_envs
    joined = [jax.ShapeDtypeStruct(_joined(v.shape, copies), v.dtype) for v in values]
    # a barrier: what the program gives out is its own, not memory that the next unroll writes to
    program = jax.make_jaxpr(lambda *leaves: jax.lax.optimization_barrier(leaves))(*joined)
    known = [v.id for node in graph.nodes for v in (*node.inputs, *node.outputs)]
    first = 1 + max([*known, *(value.id for value in graph.state.inputs)])
    made = tuple(
        Value(first + i, tuple(leaf.shape), np.dtype(leaf.dtype), graph.home)
        for i, leaf in enumerate(joined)
    )
    arrival = Arrival(RECORD, unroll.side, How.JOIN)
    name, arrivals = f"{graph.home}.{RECORD}", (arrival,) * len(values)
    return Fragment(name, graph.home, program, values, arrivals, made, flops=0, means=0)


def _joined(shape: tuple[int, ...], copies: int) -> tuple[int, ...]:
    """The shape of what so many copies hold equal parts of."""
    return (*shape[:BATCH_AXIS], shape[BATCH_AXIS] * copies, *shape[BATCH_AXIS + 1 :])
