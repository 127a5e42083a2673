"""The boundaries as JAX primitives: markers in the traced jaxpr.

`send`, `unroll` and `python` become edges and nodes when the graph is cut. `mean` stays inside
fragments: it lowers to an all-reduce where the replica axis is bound and to the identity elsewhere,
so one traced program serves any number of learner replicas.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax._src.core import extend_axis_env_nd  # binds the axis while `mean` is lowered
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from dovetail.boundaries import BATCH_AXIS, How, Side
from dovetail.graph.vectors import pack, unpack

REPLICA_AXIS = "replica"
"""The mesh axis of the learner replicas."""


class Crossing(NamedTuple):
    """The parameters of a `send` equation."""

    name: str
    """The boundary the user called."""
    source: Side | None
    """The required side of the values; None for any single side."""
    target: Side | None
    """The destination; None for the side that made the `call`."""
    how: How
    number: int
    """Its position among the crossings of the iteration."""
    call: tuple[int, ...] = ()
    """For the results of a `call`: the numbers of the crossings that carried its arguments."""
    times: int = 1
    """Number of source copies joined: the batch axis grows by this factor."""
    parts: int = 1
    """Number of target copies: the batch axis is divided by it."""


def _sent(*leaves: ShapedArray, crossing: Crossing) -> list[ShapedArray]:
    """The shapes at the target."""
    return [scaled(leaf, crossing.times, crossing.parts) for leaf in leaves]


def scaled(leaf: ShapedArray, times: int, parts: int) -> ShapedArray:
    """The shape of an array whose batch axis is multiplied by `times` and divided by `parts`."""
    if times == parts or len(leaf.shape) <= BATCH_AXIS:
        return leaf
    shape = list(leaf.shape)
    shape[BATCH_AXIS] = shape[BATCH_AXIS] * times // parts
    return leaf.update(shape=tuple(shape))


def _keep_used(used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    """Dead-code elimination for `send`: drops the values that are never read."""
    if not any(used):
        return [False] * len(eqn.invars), None

    def pick(atoms: Sequence[Any]) -> list[Any]:
        return [atom for atom, is_used in zip(atoms, used, strict=True) if is_used]

    return list(used), eqn.replace(invars=pick(eqn.invars), outvars=pick(eqn.outvars))


send_p = Primitive("send")
send_p.multiple_results = True
send_p.def_abstract_eval(_sent)
# Without a rule, JAX keeps all values of an equation if one of them is read.
pe.dce_rules[send_p] = _keep_used

python_p = Primitive("python")
"""A plain Python function; `spec` is a `PythonSpec`."""
python_p.multiple_results = True
python_p.def_abstract_eval(lambda *_, spec: list(spec.out_avals))

unroll_p = Primitive("unroll")
unroll_p.multiple_results = True
unroll_p.def_abstract_eval(lambda *_, spec, **__: spec.out_avals)


def _collective(name: str, reduce: Callable[[jax.Array, str], jax.Array]) -> Primitive:
    """A primitive that reduces over the learner replicas; the identity with one."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    # Outside jit there is one learner.
    primitive.def_impl(lambda *leaves: leaves)
    primitive.def_abstract_eval(lambda *leaves: leaves)
    # Elementwise in every array, so batch dimensions pass through.
    batching.primitive_batchers[primitive] = lambda leaves, dims: (primitive.bind(*leaves), dims)

    def all_reduce(*leaves: jax.Array) -> list[jax.Array]:
        """Reduces all leaves in one collective, since each has a fixed cost."""
        return unpack(reduce(pack(leaves), REPLICA_AXIS), leaves)

    def lower(ctx: mlir.LoweringRuleContext, *leaves: Any) -> Any:
        context = ctx.module_context.axis_context
        if REPLICA_AXIS not in getattr(context, "manual_axes", ()):
            # The axis context lists the mesh axes of the enclosing shard_map.
            return leaves  # not in a shard_map over replicas: there is one
        size = context.mesh.shape[REPLICA_AXIS]  # type: ignore[union-attr]
        with extend_axis_env_nd([(REPLICA_AXIS, size)]):
            return mlir.lower_fun(all_reduce, multiple_results=True)(ctx, *leaves)

    mlir.register_lowering(primitive, lower)
    return primitive


# The mean is linear, and its transpose is again a mean.
mean_p = _collective("mean", jax.lax.pmean)
ad.deflinear2(mean_p, lambda cotangents, *_: mean_p.bind(*map(ad.instantiate_zeros, cotangents)))
max_p = _collective("max", jax.lax.pmax)


def mean(tree: Any) -> Any:
    """Averages every leaf over the learner replicas; the identity with one."""
    return _over_replicas(mean_p, tree)


def largest(tree: Any) -> Any:
    """Elementwise maximum of every leaf over the learner replicas; the identity with one."""
    return _over_replicas(max_p, tree)


def _over_replicas(primitive: Primitive, tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(primitive.bind(*map(jnp.asarray, leaves)))


part_p = Primitive("part")
part_p.def_abstract_eval(lambda leaf, *, parts: scaled(leaf, 1, parts))


def _own_part(leaf: jax.Array, *, parts: int) -> jax.Array:
    size = leaf.shape[BATCH_AXIS] // parts
    first = jax.lax.axis_index(REPLICA_AXIS) * size
    return jax.lax.dynamic_slice_in_dim(leaf, first, size, BATCH_AXIS)


def _lower_part(ctx: mlir.LoweringRuleContext, leaf: Any, *, parts: int) -> Any:
    mesh: Any = getattr(ctx.module_context.axis_context, "mesh", None)
    # Bound only in replicated programs, so there is always a mesh.
    size = mesh.shape[REPLICA_AXIS]
    with extend_axis_env_nd([(REPLICA_AXIS, size)]):
        return mlir.lower_fun(partial(_own_part, parts=parts), multiple_results=False)(ctx, leaf)


mlir.register_lowering(part_p, _lower_part)


def part(array: jax.Array, parts: int) -> jax.Array:
    """This learner replica's slice of an array split into `parts` along the batch axis."""
    return array if parts == 1 else part_p.bind(array, parts=parts)


REGIONS = frozenset({unroll_p, python_p})
"""Primitives whose equations each become a node."""
BOUNDARIES = frozenset({send_p, *REGIONS})
"""Where the graph may be cut. `mean` is excluded: it synchronizes inside a fragment."""


def where(source_info: jex.source_info_util.SourceInfo) -> str:
    """The user's file and line of an equation."""
    return jex.source_info_util.summarize(source_info).split(" (")[0]
