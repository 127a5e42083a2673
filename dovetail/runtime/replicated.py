"""A learner fragment on several devices: its part of the batch on each, the same state on all."""

from collections.abc import Callable, Sequence

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from dovetail.boundaries import How
from dovetail.graph.ir import Arrival, Fragment, Graph
from dovetail.graph.primitives import REPLICA_AXIS
from dovetail.runtime.arrays import Input, Leaf, Values, avals_of, zeros_of
from dovetail.runtime.devices import (
    BY_ENVIRONMENT,
    PER_REPLICA,
    WHOLE,
    Device,
    mesh_of,
    own_devices,
    replicated,
    split_over,
)
from dovetail.runtime.joins import CountPieces, comes_split, joined, sent_shape, whole_shape


class ReplicatedProgram:
    """One learner fragment on several devices.

    Joined arrays are sharded by environment or item, the learner's state is replicated, and `mean`
    is a collective.
    """

    def __init__(
        self, fragment: Fragment, graph: Graph, devices: Sequence[Device], pieces: CountPieces
    ) -> None:
        self.name = fragment.name
        self._inputs = [value.id for value in fragment.inputs]
        self._outputs = [value.id for value in fragment.outputs]
        self._arrivals = fragment.arrivals
        self._mesh = mesh_of(devices)
        self._avals = avals_of(fragment.program.jaxpr.invars)
        self._pieces = pieces
        self._split = {
            value.id
            for edge in graph.edges
            if edge.from_side == fragment.side and edge.how is How.JOIN
            for value in edge.values
        }
        # Each replica has the metrics of its part of the batch: report their mean.
        metrics = {value.id for _, value in graph.metrics}
        shared = {value.id for slot in (graph.state.inputs, graph.state.outputs) for value in slot}
        shared |= metrics | {v.id for edge in graph.edges for v in edge.values}
        arriving = zip(self._inputs, self._arrivals, strict=True)
        inward = [self._spec(number, how, shared) for number, how in arriving]
        outward = [self._spec(number, None, shared) for number in self._outputs]
        function = jaxpr_as_fun(fragment.program)

        def replica(*inputs: jax.Array) -> list[jax.Array]:
            own = [
                x[0] if spec == PER_REPLICA else x for x, spec in zip(inputs, inward, strict=True)
            ]
            made = function(*own)
            return [
                x[None] if spec == PER_REPLICA else _averaged(x) if number in metrics else x
                for x, spec, number in zip(made, outward, self._outputs, strict=True)
            ]

        sharded: Callable[..., list[jax.Array]] = jax.shard_map(
            replica,
            mesh=self._mesh,
            in_specs=tuple(inward),
            out_specs=outward,
            # JAX cannot infer that state updated with averaged gradients is equal on all devices.
            check_vma=False,
        )

        def join_and_run(*inputs: Input) -> list[jax.Array]:
            pairs = zip(self._arrivals, inputs, strict=True)
            return sharded(*[x if comes_split(how) else joined(how, x) for how, x in pairs])

        self._call: Callable[..., list[jax.Array]] = jax.jit(join_and_run)

    def _spec(self, number: int, how: Arrival | None, shared: set[int]) -> PartitionSpec:
        """How a value is laid out: split by environment, the same everywhere, or per replica."""
        if comes_split(how) or (how is None and number in self._split):
            return BY_ENVIRONMENT
        return WHOLE if how is not None or number in shared else PER_REPLICA

    def compile(self) -> None:
        """Compiles by one call on zeros."""
        replicas = len(own_devices(self._mesh))
        values: Values = {}
        for number, how, aval in zip(self._inputs, self._arrivals, self._avals, strict=True):
            whole = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
            if comes_split(how):
                whole = whole_shape(whole, replicas)
            sent = sent_shape(whole, how, self._pieces)
            values[number] = jax.tree.map(zeros_of, sent)
        self.run(values)

    def run(self, values: Values) -> None:
        """Takes its inputs from `values` and puts its outputs there."""
        inputs = [
            self._placed(values[number], how)
            for number, how in zip(self._inputs, self._arrivals, strict=True)
        ]
        outputs = self._call(*inputs)
        jax.block_until_ready(outputs)
        values.update(zip(self._outputs, outputs, strict=True))

    def _placed(self, value: Input, how: Arrival | None) -> Leaf | list[jax.Array]:
        """Moves an input to the devices, unless it is there already."""
        if comes_split(how):
            return split_over(value, self._mesh)
        if isinstance(value, list):
            return [replicated(piece, self._mesh) for piece in value]
        if isinstance(value, jax.Array) and value.sharding.device_set == set(
            self._mesh.devices.flat
        ):
            return value
        return replicated(value, self._mesh)


def _averaged(metric: jax.Array) -> jax.Array:
    return jax.lax.pmean(metric, REPLICA_AXIS)
