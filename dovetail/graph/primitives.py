"""The boundaries as JAX primitives: markers that tracing leaves in the jaxpr.

`broadcast`, `gather`, `reduce` and `unroll` exist only until the graph is cut: they become edges and
nodes. `mean` stays inside fragments: it lowers to an all-reduce where the replica axis is bound and
to the identity elsewhere, so one traced program serves any number of learner replicas.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax._src.core import extend_axis_env_nd  # binds the axis while `mean` is lowered
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from dovetail.graph.ir import Side

REPLICA_AXIS = "replica"
"""The mesh axis over which learner replicas are joined."""

CROSSINGS: dict[str, tuple[Side, Side]] = {
    "broadcast": (Side.LEARNER, Side.ACTOR),
    "gather": (Side.ACTOR, Side.LEARNER),
    "reduce": (Side.ACTOR, Side.LEARNER),
}
"""The boundaries that carry values from one side to another."""


def _crossing(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *leaves, **_: leaves)

    def keep_used(used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
        if not any(used):
            return [False] * len(eqn.invars), None
        pick: Callable[[Sequence[Any]], list[Any]] = lambda xs: [
            x for x, u in zip(xs, used, strict=True) if u
        ]
        return list(used), eqn.replace(invars=pick(eqn.invars), outvars=pick(eqn.outvars))

    pe.dce_rules[primitive] = keep_used
    return primitive


crossing_p = {name: _crossing(name) for name in CROSSINGS}

unroll_p = Primitive("unroll")
unroll_p.multiple_results = True
unroll_p.def_abstract_eval(lambda *_, spec, **__: spec.out_avals)

mean_p = Primitive("mean")
mean_p.def_impl(lambda x: x)
mean_p.def_abstract_eval(lambda x: x)
batching.primitive_batchers[mean_p] = lambda args, dims: (mean_p.bind(args[0]), dims[0])
ad.deflinear2(mean_p, lambda cotangent, _: [mean_p.bind(cotangent)])


def _lower_mean(ctx: mlir.LoweringRuleContext, x: Any) -> Any:
    context = ctx.module_context.axis_context
    if REPLICA_AXIS not in getattr(context, "manual_axes", ()):
        return [x]
    size = context.mesh.shape[REPLICA_AXIS]  # type: ignore[union-attr]
    with extend_axis_env_nd([(REPLICA_AXIS, size)]):
        pmean = mlir.lower_fun(lambda y: jax.lax.pmean(y, REPLICA_AXIS), multiple_results=False)
        return pmean(ctx, x)


mlir.register_lowering(mean_p, _lower_mean)


def mean(tree: Any) -> Any:
    """Averages every leaf over the learner replicas; the identity with one."""
    return jax.tree.map(lambda leaf: mean_p.bind(jnp.asarray(leaf)), tree)


BOUNDARIES = frozenset({unroll_p, *crossing_p.values()})
"""Where the graph may be cut; `mean` is not among them, it synchronises inside a fragment."""


def where(source_info: jex.source_info_util.SourceInfo) -> str:
    """The user's file and line of an equation."""
    return jex.source_info_util.summarize(source_info).split(" (")[0]
