"""A whole graph as one pure function of leaves, for plans with only fused links."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from dovetail.boundaries import BATCH_AXIS, How, Side
from dovetail.envs.interface import JaxEnv
from dovetail.graph.ir import Fragment, Graph, Unroll
from dovetail.graph.primitives import REPLICA_AXIS, part
from dovetail.runtime.arrays import Leaf, Values, leaves_of, numbered
from dovetail.runtime.devices import PER_REPLICA, WHOLE, Device, mesh_of
from dovetail.runtime.unroll_functions import run_unroll

T = TypeVar("T")
NO_COPIES: Mapping[Side, int] = MappingProxyType({})
Leaves = list[Leaf]


class Iterated(NamedTuple):
    """The results of iterations: the states after them, and what they report."""

    state: Leaves
    actor: Leaves
    metrics: Leaves
    episodes: Leaves
    """Finished episodes per environment [B]: number, sum of returns, sum of lengths."""
    tapped: Leaves
    """The values of the graph's tap."""


Iteration = Callable[[Leaves, Leaves], Iterated]
"""(state, actor) → the results of one iteration."""
Dispatch = Callable[[Leaves, Leaves, Leaves, jax.Array], Iterated]
"""(state, recorded steps, actor, count) → the results of `count` iterations; the state is without
the recorded steps."""


def iteration(
    graph: Graph, env: JaxEnv | None, copies: Mapping[Side, int] = NO_COPIES
) -> Iteration:
    """One iteration of the whole graph as a function of leaves.

    `env` is None only for an offline algorithm. With `copies`, the function is one replica's part,
    for `shard_map`.
    """

    def taken(node: Fragment, values: Values) -> list[Leaf]:
        triples = zip(leaves_of(values, node.inputs), node.arrivals, strict=True)
        takers = copies.get(node.side, 1)
        return [
            leaf if how is None else _brought(leaf, how.how, copies.get(how.source, 1), takers)
            for leaf, how in triples
        ]

    def run(state: Leaves, actor: Leaves) -> Iterated:
        values = numbered(graph.state.inputs, state) | numbered(graph.actor.inputs, actor)
        for node in graph.nodes:
            if isinstance(node, Unroll):
                assert env is not None
                run_unroll(node, env, graph, values)
            else:
                assert isinstance(node, Fragment)
                outputs = jaxpr_as_fun(node.program)(*taken(node, values))
                values |= numbered(node.outputs, outputs)
        return Iterated(
            leaves_of(values, graph.state.outputs),
            leaves_of(values, graph.actor.outputs),
            leaves_of(values, [value for _, value in graph.metrics]),
            leaves_of(values, graph.episodes),
            leaves_of(values, graph.tapped),
        )

    return run


def _brought(leaf: Leaf, how: How, senders: int, takers: int) -> Leaf:
    """Moves a value between copies that are replicas of one program.

    Every replica computes a side with a single copy.
    """
    if how is How.DIVIDE or (how is How.JOIN and senders < takers):
        return part(jnp.asarray(leaf), takers)
    if how is How.JOIN and senders > takers:
        return jax.lax.all_gather(leaf, REPLICA_AXIS, axis=BATCH_AXIS, tiled=True)
    return leaf


class Parts:
    """Splits the state into changing leaves and recorded steps.

    Iterations only read recorded steps. Programs do not return them, since that would copy them.
    """

    def __init__(self, graph: Graph) -> None:
        self._data = frozenset(graph.data)

    def apart(self, state: Sequence[T]) -> tuple[list[T], list[T]]:
        """Splits the leaves of a state, or their shapes, into (changing, recorded)."""
        changing = [leaf for i, leaf in enumerate(state) if i not in self._data]
        return changing, [leaf for i, leaf in enumerate(state) if i in self._data]

    def whole(self, changing: Sequence[Leaf], data: Sequence[Leaf]) -> Leaves:
        """Inverse of `apart`."""
        rest, recorded = iter(changing), iter(data)
        total = len(changing) + len(data)
        return [next(recorded if i in self._data else rest) for i in range(total)]


def many_iterations(
    graph: Graph, env: JaxEnv | None, copies: Mapping[Side, int] = NO_COPIES
) -> Dispatch:
    """`count` iterations in one dispatch; `count` is a traced argument.

    Metrics and episodes are summed over the iterations; tapped values are those of the last one.
    """
    once, parts = iteration(graph, env, copies), Parts(graph)

    def run(state: Leaves, data: Leaves, actor: Leaves, count: jax.Array) -> Iterated:
        def step(state: Leaves, actor: Leaves) -> Iterated:
            after = once(parts.whole(state, data), actor)
            # Recorded steps are closed over, not carried: a carried array would be copied.
            return after._replace(state=parts.apart(after.state)[0])

        # The loop carries the sums, so it needs zeros of their shapes to start with.
        shapes = jax.eval_shape(step, state, actor)
        reported = shapes.metrics, shapes.episodes, shapes.tapped
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), reported)

        def body(_: jax.Array, before: Iterated) -> Iterated:
            after = step(before.state, before.actor)
            sums = jax.tree.map(
                jnp.add, (before.metrics, before.episodes), (after.metrics, after.episodes)
            )
            return after._replace(metrics=sums[0], episodes=sums[1])

        return jax.lax.fori_loop(0, count, body, Iterated(state, actor, *zeros))

    return run


def over_seeds(program: Dispatch) -> Dispatch:
    """Maps the program over a leading axis of seeds, which share the recorded steps."""
    return jax.vmap(program, in_axes=(0, None, 0, None))


def over_devices(program: Dispatch, devices: Sequence[Device], divided: Sequence[bool]) -> Dispatch:
    """Shards the program over several devices.

    Environments are split, and so are the `divided` leaves of the state, along a leading axis. The
    other leaves are replicated.
    """
    mesh = mesh_of(devices)
    specs = [PER_REPLICA if split else WHOLE for split in divided]

    def replica(state: Leaves, data: Leaves, actor: Leaves, count: jax.Array) -> Iterated:
        own = [leaf[0] if split else leaf for leaf, split in zip(state, divided, strict=True)]
        after = program(own, data, actor, count)
        kept = zip(after.state, divided, strict=True)
        return after._replace(
            state=[leaf[None] if split else leaf for leaf, split in kept],
            metrics=jax.lax.pmean(after.metrics, REPLICA_AXIS),
            tapped=[],
        )

    return jax.shard_map(
        replica,
        mesh=mesh,
        in_specs=(specs, WHOLE, PER_REPLICA, WHOLE),
        out_specs=Iterated._make((specs, PER_REPLICA, WHOLE, PER_REPLICA, WHOLE)),
        # JAX cannot infer that state updated with averaged gradients is equal on all devices.
        check_vma=False,
    )
