"""The functions of an unroll, rebuilt from the jaxprs of the graph."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from dovetail.envs import batched
from dovetail.envs.interface import JaxEnv
from dovetail.graph.ir import Graph, Inner, Unroll
from dovetail.graph.unroll import Act, Bootstrap, Reset, masked_reset, resetting, unroll_scan
from dovetail.runtime.arrays import Leaf, Values, leaves_of, numbered


def act_function(unroll: Unroll, inputs: Sequence[Leaf]) -> Act:
    """(params, carry, timestep, keys) → (action, extras, carry) with `inputs` filled in."""
    return _inner_function(unroll.act, unroll.act_inputs(inputs))


def reset_function(unroll: Unroll, default: Callable[[object], Reset] = masked_reset) -> Reset:
    """(carry, first) → carry: the algorithm's `reset_carry`, or else `default(initial carry)`."""
    if unroll.reset is None:
        return default(unroll.carry_tree.unflatten(unroll.initial_carry))
    assert unroll.reset.program is not None
    function = jaxpr_as_fun(unroll.reset.program)

    def reset(carry: object, first: jax.Array) -> object:
        return unroll.carry_tree.unflatten(function(*jax.tree.leaves(carry), first))

    return reset


def bootstrap_function(unroll: Unroll, inputs: Sequence[Leaf]) -> Bootstrap | None:
    """(params, carry, timestep) → values, with `inputs` filled in."""
    if unroll.bootstrap is None:
        return None
    return _inner_function(unroll.bootstrap, unroll.bootstrap_inputs(inputs))


def _inner_function(inner: Inner, filled: list[Leaf]) -> Callable[..., Any]:
    """An inner program as a function of trees; `filled` are its first inputs."""
    program, tree = inner.program, inner.out_tree
    assert program is not None and tree is not None
    function = jaxpr_as_fun(program)

    def call(_: object, *args: object) -> object:
        # The first argument is the weights, which are among the values filled in.
        return tree.unflatten(function(*filled, *jax.tree.leaves(args)))

    return call


def run_unroll(unroll: Unroll, env: JaxEnv, graph: Graph, values: Values) -> None:
    """Runs a compiled unroll as part of a larger program; writes its outputs to `values`."""
    inputs = leaves_of(values, unroll.inputs)
    trajectory, actor, episodes = unroll_scan(
        resetting(act_function(unroll, inputs), reset_function(unroll)),
        lambda state, action, keys: batched.step(env, state, action, keys),
        bootstrap_function(unroll, inputs),
        unroll.length,
        (),  # the weights are among the inputs that are filled in
        graph.actor.tree.unflatten(leaves_of(values, unroll.actor_inputs)),
        info=len(env.spec.info),
    )
    outputs = jax.tree.leaves((trajectory, actor, episodes))
    values |= numbered(unroll.outputs, outputs)
