"""The boundaries as JAX primitives: markers that tracing leaves in the jaxpr.

`broadcast`, `gather`, `reduce`, `unroll` and what goes to and from a replay exist only until the
graph is cut, and become edges and nodes. `mean` stays inside fragments: it lowers to an all-reduce
where the replica axis is bound and to the identity elsewhere, so one traced program serves any
number of learner replicas.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax._src.core import extend_axis_env_nd  # binds the axis while `mean` is lowered
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from dovetail.graph.ir import Side
from dovetail.graph.vectors import pack, unpack

REPLICA_AXIS = "replica"
"""The mesh axis over which learner replicas are joined."""

CROSSINGS: dict[str, tuple[Side, Side]] = {
    "broadcast": (Side.LEARNER, Side.ACTOR),
    "gather": (Side.ACTOR, Side.LEARNER),
    "reduce": (Side.ACTOR, Side.LEARNER),
    "insert": (Side.ACTOR, Side.REPLAY),
    "draw": (Side.LEARNER, Side.REPLAY),
    "sample": (Side.REPLAY, Side.LEARNER),
    "update_priorities": (Side.LEARNER, Side.REPLAY),
}
"""The boundaries that carry values from one side to another."""

COLLECTED = "sample"
"""That at which what the shards of a replay send is joined."""
JOINED = frozenset({"gather", "insert", COLLECTED})
"""Those at which what several send is joined: actors along the environments, shards along the items
of a batch."""
DIVIDED = frozenset({"draw", "update_priorities"})
"""Those at which each shard of a replay gets its part of what is sent."""


PARTS_AXIS = 1
"""Along which axis parts are joined and divided: the environments' in trajectories, which are
time-major, and that of a batch's items in samples."""


def _joined(*leaves: ShapedArray, pieces: int) -> list[ShapedArray]:
    """What one gets when `pieces` of them each send arrays like these."""
    return [_scaled(leaf, pieces, 1) for leaf in leaves]


def _divided(*leaves: ShapedArray, pieces: int) -> list[ShapedArray]:
    """What one of `pieces` gets of arrays like these."""
    return [_scaled(leaf, 1, pieces) for leaf in leaves]


def _scaled(leaf: ShapedArray, times: int, parts: int) -> ShapedArray:
    if times == parts == 1:
        return leaf
    shape = list(leaf.shape)
    shape[PARTS_AXIS] = shape[PARTS_AXIS] * times // parts
    return leaf.update(shape=tuple(shape))


def _abstract(name: str) -> Callable[..., Sequence[ShapedArray]]:
    """The shapes that arrive over a boundary."""
    if name in JOINED:
        return _joined
    return _divided if name in DIVIDED else lambda *leaves: leaves


def _crossing(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(_abstract(name))

    def keep_used(used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
        if not any(used):
            return [False] * len(eqn.invars), None

        def pick(atoms: Sequence[Any]) -> list[Any]:
            return [atom for atom, is_used in zip(atoms, used, strict=True) if is_used]

        return list(used), eqn.replace(invars=pick(eqn.invars), outvars=pick(eqn.outvars))

    pe.dce_rules[primitive] = keep_used
    return primitive


crossing_p = {name: _crossing(name) for name in CROSSINGS}

unroll_p = Primitive("unroll")
unroll_p.multiple_results = True
unroll_p.def_abstract_eval(lambda *_, spec, **__: spec.out_avals)

mean_p = Primitive("mean")
mean_p.multiple_results = True
mean_p.def_impl(lambda *leaves: leaves)
mean_p.def_abstract_eval(lambda *leaves: leaves)
batching.primitive_batchers[mean_p] = lambda leaves, dims: (mean_p.bind(*leaves), dims)
ad.deflinear2(mean_p, lambda cotangents, *_: mean_p.bind(*map(ad.instantiate_zeros, cotangents)))


def _all_reduce(*leaves: jax.Array) -> list[jax.Array]:
    """The leaves averaged over the replicas, in one transfer: a collective costs per call."""
    return unpack(jax.lax.pmean(pack(leaves), REPLICA_AXIS), leaves)


def _lower_mean(ctx: mlir.LoweringRuleContext, *leaves: Any) -> Any:
    context = ctx.module_context.axis_context
    if REPLICA_AXIS not in getattr(context, "manual_axes", ()):
        return leaves
    size = context.mesh.shape[REPLICA_AXIS]  # type: ignore[union-attr]
    with extend_axis_env_nd([(REPLICA_AXIS, size)]):
        return mlir.lower_fun(_all_reduce, multiple_results=True)(ctx, *leaves)


mlir.register_lowering(mean_p, _lower_mean)


def mean(tree: Any) -> Any:
    """Averages every leaf over the learner replicas; the identity with one."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(mean_p.bind(*map(jnp.asarray, leaves)))


part_p = Primitive("part")
part_p.def_abstract_eval(lambda leaf, *, parts: _scaled(leaf, 1, parts))


def _own_part(leaf: jax.Array, *, parts: int) -> jax.Array:
    size = leaf.shape[PARTS_AXIS] // parts
    first = jax.lax.axis_index(REPLICA_AXIS) * size
    return jax.lax.dynamic_slice_in_dim(leaf, first, size, PARTS_AXIS)


def _lower_part(ctx: mlir.LoweringRuleContext, leaf: Any, *, parts: int) -> Any:
    mesh: Any = getattr(ctx.module_context.axis_context, "mesh", None)
    size = mesh.shape[REPLICA_AXIS]
    with extend_axis_env_nd([(REPLICA_AXIS, size)]):
        return mlir.lower_fun(partial(_own_part, parts=parts), multiple_results=False)(ctx, leaf)


mlir.register_lowering(part_p, _lower_part)


def part(array: jax.Array, parts: int) -> jax.Array:
    """Of `parts` equal parts of an array, along the items of a batch, this learner replica's."""
    return array if parts == 1 else part_p.bind(array, parts=parts)


BOUNDARIES = frozenset({unroll_p, *crossing_p.values()})
"""Where the graph may be cut; `mean` is not among them, it synchronises inside a fragment."""


def where(source_info: jex.source_info_util.SourceInfo) -> str:
    """The user's file and line of an equation."""
    return jex.source_info_util.summarize(source_info).split(" (")[0]
