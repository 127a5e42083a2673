"""Programs: what a worker runs. Each takes values by number and gives values by number.

`iteration` evaluates a whole graph as one pure function, for links that are all fused;
`FragmentProgram` is one fragment compiled alone; the host's side of an unroll is in `host.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AxisType, Mesh, PartitionSpec

from dovetail.envs import batched
from dovetail.envs.interface import JaxEnv
from dovetail.graph.ir import Fragment, Graph, Unroll
from dovetail.graph.primitives import REPLICA_AXIS
from dovetail.graph.unroll import ActorState, unroll_scan

Values = dict[int, Any]
"""The arrays of a running iteration, by their values' numbers."""
Leaves = list[jax.Array]


class FragmentProgram:
    """One fragment, compiled alone."""

    def __init__(self, fragment: Fragment) -> None:
        self.name = fragment.name
        self._inputs = [value.id for value in fragment.inputs]
        self._outputs = [value.id for value in fragment.outputs]
        self._call: Callable[..., Any] = jax.jit(jaxpr_as_fun(fragment.program))
        self._shapes = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in fragment.program.jaxpr.invars
        ]

    def compile(self) -> None:
        """Compiles by one call on zeros: jit's own way in is faster than a program made ahead."""
        jax.block_until_ready(self._call(*[jnp.zeros(s.shape, s.dtype) for s in self._shapes]))

    def run(self, values: Values) -> None:
        """Takes its inputs from `values` and puts its outputs there."""
        outputs = self._call(*[values[number] for number in self._inputs])
        jax.block_until_ready(outputs[0])  # so that its time is counted here
        values.update(zip(self._outputs, outputs, strict=True))


def act_function(unroll: Unroll, inputs: Sequence[Any]) -> Callable[..., Any]:
    """(params, carry, timestep, keys) → (action, extras, carry) with `inputs` filled in."""
    return _inner_function(unroll.act.program, unroll.act.out_tree, unroll.act_inputs(inputs))


def bootstrap_function(unroll: Unroll, inputs: Sequence[Any]) -> Callable[..., Any] | None:
    """(params, carry, timestep) → values, with `inputs` filled in."""
    if unroll.bootstrap is None:
        return None
    inner = unroll.bootstrap
    return _inner_function(inner.program, inner.out_tree, unroll.bootstrap_inputs(inputs))


def _inner_function(
    program: ClosedJaxpr | None, tree: Any, filled: list[Any]
) -> Callable[..., Any]:
    assert program is not None and tree is not None
    function = jaxpr_as_fun(program)

    def call(_: Any, *args: Any) -> Any:
        return tree.unflatten(function(*filled, *jax.tree.leaves(args)))

    return call


def run_unroll(unroll: Unroll, env: JaxEnv, graph: Graph, values: Values) -> None:
    """The compiled unroll, inside a larger program."""
    inputs = [values[value.id] for value in unroll.inputs]
    actor: ActorState = graph.actor.tree.unflatten([values[v.id] for v in unroll.actor_inputs])
    trajectory, actor, episodes = unroll_scan(
        act_function(unroll, inputs),
        lambda state, action, keys: batched.step(env, state, action, keys),
        bootstrap_function(unroll, inputs),
        unroll.length,
        (),
        actor,
    )
    outputs = [*jax.tree.leaves(trajectory), *jax.tree.leaves(actor), *episodes]
    numbers = [value.id for value in unroll.outputs]
    values.update(zip(numbers, outputs, strict=True))


def iteration(graph: Graph, env: JaxEnv) -> Callable[[Leaves, Leaves], tuple[Any, ...]]:
    """One iteration of the whole graph: (state, actor) → (state, actor, metrics, episodes)."""

    def run(state: Leaves, actor: Leaves) -> tuple[Leaves, Leaves, Leaves, Leaves]:
        values: Values = dict(zip((v.id for v in graph.state.inputs), state, strict=True))
        values.update(zip((v.id for v in graph.actor.inputs), actor, strict=True))
        for node in graph.nodes:
            if isinstance(node, Unroll):
                run_unroll(node, env, graph, values)
            else:
                outputs = jaxpr_as_fun(node.program)(*[values[v.id] for v in node.inputs])
                values.update(zip((v.id for v in node.outputs), outputs, strict=True))
        return (
            [values[v.id] for v in graph.state.outputs],
            [values[v.id] for v in graph.actor.outputs],
            [values[v.id] for _, v in graph.metrics],
            [values[v.id] for v in graph.episodes],
        )

    return run


def many_iterations(graph: Graph, env: JaxEnv) -> Callable[..., tuple[Any, ...]]:
    """`count` iterations in one dispatch; metrics and episodes come back summed over them."""
    once = iteration(graph, env)

    def run(state: Leaves, actor: Leaves, count: jax.Array) -> tuple[Any, ...]:
        shapes = jax.eval_shape(once, state, actor)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[2:])

        def body(_: jax.Array, loop: tuple[Any, ...]) -> tuple[Any, ...]:
            state, actor, *sums = loop
            state, actor, *new = once(state, actor)
            return (state, actor, *jax.tree.map(jnp.add, sums, new))

        return jax.lax.fori_loop(0, count, body, (state, actor, *zeros))

    return run


def over_seeds(program: Callable[..., Any]) -> Callable[..., Any]:
    """The program mapped over a leading axis of seeds."""
    return jax.vmap(program, in_axes=(0, 0, None))


def over_devices(program: Callable[..., Any], devices: Sequence[Any]) -> Callable[..., Any]:
    """The program on several devices: environments split, the learner's state replicated."""
    mesh = Mesh(list(devices), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))
    whole, split = PartitionSpec(), PartitionSpec(REPLICA_AXIS)

    def replica(state: Leaves, actor: Leaves, count: jax.Array) -> tuple[Any, ...]:
        state, actor, metrics, episodes = program(state, actor, count)
        return state, actor, jax.lax.pmean(metrics, REPLICA_AXIS), episodes

    return jax.shard_map(
        replica,
        mesh=mesh,
        in_specs=(whole, split, whole),
        out_specs=(whole, split, whole, split),
        check_vma=False,
    )
