"""Describes an unroll for the graph: its per-step programs, its shapes and its operands."""

import dataclasses
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr

from dovetail.algorithm import Algorithm, Params
from dovetail.batching import defines, over_batch, preferred, takes_batch
from dovetail.boundaries import ACTOR, ENVIRONMENT, Side
from dovetail.envs import batched
from dovetail.envs.interface import EnvSpec, JaxEnv
from dovetail.graph.check import (
    ACT,
    check_action,
    check_batch,
    check_bootstrap,
    results,
    same_carry,
)
from dovetail.graph.cost import flops
from dovetail.graph.ir import Inner
from dovetail.graph.traced import UnrollSpec
from dovetail.graph.unroll import ActorState, Reset, masked_reset, resetting, unroll_scan


@dataclasses.dataclass(frozen=True)
class Acting:
    """Who acts at an unroll, and where."""

    algorithm: Algorithm
    spec: EnvSpec
    env: JaxEnv | None
    """None for host environments."""
    actor: ActorState
    """The actors' state before the unroll, as tracers [B, …]."""
    initial_carry: Any
    """The carry of one environment at the start of an episode."""
    batch: int | None
    """Environments per call of acting; None for all of an actor's."""

    def describe(
        self, act: Callable[..., Any], params: Params, length: int, bootstrap: Any
    ) -> tuple[UnrollSpec, list[jax.Array]]:
        """The spec of an unroll and its operands: captured values, then the leaves of `params`."""
        actor, whole_act = self.actor, self._on_batch(act)
        value = over_batch(bootstrap) if bootstrap is not None else None
        served = jax.tree.map(self._served, (actor.carry, actor.timestep, actor.keys))
        act_inner, act_captured = _inner("act", whole_act, params, *served)
        # FLOPs are per step of all the actor's environments, which may take several calls.
        calls = actor.step.shape[0] / jax.tree.leaves(served)[0].shape[0]
        act_inner = dataclasses.replace(act_inner, flops=round(calls * act_inner.flops))
        value_inner, value_captured = None, []
        if value is not None:
            value_inner, value_captured = _inner(
                "bootstrap", value, params, actor.carry, actor.timestep
            )
            check_bootstrap(self.algorithm, bootstrap, value_inner.out_tree)
        reset_inner, reset = self._describe_reset()
        step = step_function(self.env, self.spec, actor.step.shape[0])
        step_inner, action_bytes, seen_bytes = self._describe_step(step, whole_act, params)
        # The whole unroll is traced for its shapes alone; the programs above are run instead.
        shapes = jax.eval_shape(
            lambda params, actor: unroll_scan(
                resetting(whole_act, reset),
                step,
                value,
                length,
                params,
                actor,
                info=len(self.spec.info),
            ),
            params,
            actor,
        )
        operands = act_captured + value_captured + jax.tree.leaves(params)
        leaves, carry_tree = jax.tree.flatten(self.initial_carry)
        spec = UnrollSpec(
            length=length,
            act=act_inner,
            step=step_inner,
            bootstrap=value_inner,
            reset=reset_inner,
            num_inputs=len(operands),
            out_avals=tuple(ShapedArray(s.shape, s.dtype) for s in jax.tree.leaves(shapes)),
            trajectory_tree=jax.tree.structure(shapes[0]),
            initial_carry=tuple(leaves),
            carry_tree=carry_tree,
            per_step_bytes=(action_bytes, seen_bytes),
        )
        return spec, operands

    def _on_batch(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """Acting over a batch, with checks; carries are reset beforehand."""
        algorithm, chosen = self.algorithm, preferred(self.algorithm, act)
        whole, name = over_batch(chosen), "act_batch" if takes_batch(chosen) else "act"

        @wraps(chosen)
        def checked(params: Params, carry: Any, timestep: Any, keys: jax.Array) -> Any:
            made = whole(params, carry, timestep, keys)
            action, extras, after = results(algorithm, name, chosen, made, ACT)
            check_batch(algorithm, name, chosen, keys.shape[0], (action, extras))
            return action, extras, same_carry(algorithm, name, chosen, carry, after)

        return checked

    def _describe_reset(self) -> tuple[Inner | None, Reset]:
        """The algorithm's `reset_carry` as a program, if it has one, and the function to use."""
        algorithm, actor = self.algorithm, self.actor
        if not (defines(algorithm, "reset_carry") and jax.tree.leaves(actor.carry)):
            return None, masked_reset(self.initial_carry)

        def reset(carry: Any, first: jax.Array) -> Any:
            after = algorithm.reset_carry(carry, first)
            return same_carry(algorithm, "reset_carry", algorithm.reset_carry, carry, after)

        inner, _ = _inner("reset", reset, actor.carry, actor.timestep.first)
        return inner, reset

    def _served(self, leaf: jax.Array) -> jax.ShapeDtypeStruct:
        """The shape [batch, …] that one call of acting takes from an actor's [B, …]."""
        rows = leaf.shape[0] if self.batch is None else self.batch
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)

    def _describe_step(
        self, step: Callable[..., Any], act: Callable[..., Any], params: Params
    ) -> tuple[Inner, int, int]:
        """(program of a step, bytes of an action, bytes of what comes back)."""
        actor = self.actor
        action = jax.eval_shape(act, params, actor.carry, actor.timestep, actor.keys)[0]
        check_action(self.algorithm, "act", act, self.spec, action)
        after = jax.eval_shape(step, actor.env, action, actor.keys)
        seen = (after.observation, after.reward, after.terminated, after.truncated)
        # A host environment has no program; only the sizes of its messages are known.
        inner = Inner("step", ENVIRONMENT, None, 0, 0, None)
        if self.env is not None:
            inner, _ = _inner("step", step, actor.env, action, actor.keys, side=ENVIRONMENT)
        return inner, _nbytes(action), _nbytes(seen)


def step_function(env: JaxEnv | None, spec: EnvSpec, batch: int) -> Callable[..., Any]:
    """Steps a batch of JAX environments; for host environments, a stub with the same shapes."""
    if env is not None:
        return lambda state, action, keys: batched.step(env, state, action, keys)

    def shapes_only(state: Any, action: Any, keys: jax.Array) -> batched.BatchStep:
        observation = zeros(spec.observation, batch)
        flag, reward = jnp.zeros(batch, bool), jnp.zeros(batch)
        info = jnp.zeros((batch, len(spec.info))) if spec.info else ()
        return batched.BatchStep(
            state, observation, observation, reward, flag, flag, flag, flag, info
        )

    return shapes_only


def _inner(
    name: str, function: Callable[..., Any], *args: Any, side: Side = ACTOR
) -> tuple[Inner, list[Any]]:
    """Traces a per-step program; returns it with the tracers it closed over.

    These tracers become the program's first inputs; concrete constants stay constants.
    """
    closed, out_shape = jax.make_jaxpr(function, return_shape=True)(*args)
    captured = [const for const in closed.consts if isinstance(const, Tracer)]
    fixed = [const for const in closed.consts if not isinstance(const, Tracer)]
    jaxpr = closed.jaxpr
    if captured:
        pairs = list(zip(jaxpr.constvars, closed.consts, strict=True))
        moved = [var for var, const in pairs if isinstance(const, Tracer)]
        kept = [var for var, const in pairs if not isinstance(const, Tracer)]
        jaxpr = jaxpr.replace(constvars=kept, invars=[*moved, *jaxpr.invars])
        # JAX checks that the debug names match the number of arguments.
        jaxpr = jaxpr.replace(debug_info=jaxpr.debug_info._replace(arg_names=None))
    program = ClosedJaxpr(jaxpr, fixed)
    tree = jax.tree.structure(out_shape)
    return Inner(name, side, program, flops(jaxpr), len(captured), tree), captured


def zeros(structs: Any, batch: int) -> Any:
    """A batch of zeros, given the shapes of one environment."""
    return jax.tree.map(lambda s: jnp.zeros((batch, *s.shape), s.dtype), structs)


def _nbytes(tree: Any) -> int:
    return sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
