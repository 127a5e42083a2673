"""The programs that workers run. Each reads its inputs from a dict of values by number and writes
its outputs there.

A fragment on several devices is in `replicated.py`, an unroll with host environments in
`host_unroll.py`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from dovetail.boundaries import Side
from dovetail.envs.interface import JaxEnv
from dovetail.graph.ir import Fragment, Graph, Node, Python, Slots, Unroll, Value
from dovetail.graph.marks import Opened, Opens, run_python
from dovetail.runtime.arrays import (
    Input,
    Key,
    Leaf,
    Values,
    avals_of,
    is_key,
    leaves_of,
    numbered,
    zeros_of,
)
from dovetail.runtime.devices import Device, to_device
from dovetail.runtime.joins import CountPieces, joined, joined_on_host, sent_shape
from dovetail.runtime.packing import Bundle
from dovetail.runtime.unroll_functions import run_unroll


class Program(Protocol):
    """Runs one or more nodes of the graph, in the thread of its worker."""

    @property
    def name(self) -> str:
        """The name in spans and reports."""
        ...

    def run(self, values: Values, /) -> Callable[[], None] | None:
        """Takes its inputs from `values` and puts its outputs there.

        May return a function that releases the memory of its outputs, to be called when all
        readers are done.
        """
        ...


class FragmentProgram:
    """One fragment, compiled alone.

    The program itself joins pieces from several copies, and updates tables in place.
    """

    def __init__(
        self,
        fragment: Fragment,
        pieces: CountPieces = lambda _: 1,
        device: Device | None = None,
        hosted: Collection[Side] = (),
        bundles: Sequence[Bundle] = (),
        state: Slots[object] | None = None,
        tables: Collection[Side] = (),
    ) -> None:
        """Values from the sides in `hosted` arrive as numpy arrays. Each of `bundles` is one array.
        The parts of `state` on the sides in `tables` are updated in place."""
        self.name = fragment.name
        slots = () if state is None else (state.inputs, state.outputs)
        order = {value.id: i for values in slots for i, value in enumerate(values)}
        packed = {value.id for bundle in bundles for value in bundle.taken}
        kept = [bundle for bundle in bundles if bundle.made]
        made = {new.id: b.is_shared(old, new) for b in kept for old, new in b.pairs}
        alone = [i for i, value in enumerate(fragment.inputs) if value.id not in packed]
        shown = [i for i, value in enumerate(fragment.outputs) if made.get(value.id, True)]
        # JAX pairs donated inputs with outputs of the same shape in order, so sort both alike.
        alone.sort(key=lambda i: order.get(fragment.inputs[i].id, len(order)))
        shown.sort(key=lambda i: order.get(fragment.outputs[i].id, len(order)))
        ends = {value.id: i for i, value in enumerate(fragment.outputs)}
        self._inputs: list[Key] = [fragment.inputs[i].id for i in alone]
        self._inputs += [b.key_taken for b in bundles]
        self._outputs: list[Key] = [fragment.outputs[i].id for i in shown]
        self._outputs += [b.key_made for b in kept]
        self._device = device
        function = jaxpr_as_fun(fragment.program)
        arrivals = [fragment.arrivals[i] for i in alone]

        def join_and_run(*inputs: Input) -> list[jax.Array]:
            given: dict[int, Leaf] = dict(zip(alone, map(joined, arrivals, inputs), strict=False))
            unpacked: dict[int, Leaf] = {}
            for bundle, array in zip(bundles, inputs[len(alone) :], strict=True):
                assert not isinstance(array, list)  # what is packed is never sent in pieces
                numbers = (value.id for value in bundle.taken)
                unpacked.update(zip(numbers, bundle.unpack(array), strict=True))
            # A packed value that crosses two boundaries is two inputs.
            found = function(
                *[unpacked.get(v.id, given.get(i)) for i, v in enumerate(fragment.inputs)]
            )
            together = [b.pack([found[ends[value.id]] for value in b.made]) for b in kept]
            return [found[i] for i in shown] + together

        in_place = _in_place([fragment.inputs[i] for i in alone], fragment.outputs, tables)
        self._call: Callable[..., list[jax.Array]] = jax.jit(join_and_run, donate_argnums=in_place)
        avals = avals_of(fragment.program.jaxpr.invars[i] for i in alone)
        self._shapes = [
            sent_shape(aval, how, pieces) for aval, how in zip(avals, arrivals, strict=True)
        ] + [bundle.shape for bundle in bundles]
        outside = [how is not None and how.source in hosted for how in arrivals]
        self._outside = [*outside, *[not b.made and bool(hosted) for b in bundles]]

    def compile(self) -> None:
        """Compiles by one call on zeros: calling a jitted function is faster than calling an
        ahead-of-time compiled one."""
        zeros = [
            jax.tree.map(partial(self._zero, outside=outside), shape)
            for shape, outside in zip(self._shapes, self._outside, strict=True)
        ]
        jax.block_until_ready(self._call(*zeros))

    def _zero(self, shape: jax.ShapeDtypeStruct, outside: bool) -> Leaf:
        """Zeros like the real input: jit caches by the kind of array and its device."""
        if outside and not is_key(shape):
            return np.zeros(shape.shape, shape.dtype)
        zero = zeros_of(shape)
        return zero if self._device is None else jax.device_put(zero, self._device)

    def run(self, values: Values) -> None:
        """Takes its inputs from `values` and puts its outputs there."""
        inputs = [values[number] for number in self._inputs]
        if self._device is not None:
            inputs = jax.tree.map(partial(to_device, device=self._device), inputs)
        outputs = self._call(*inputs)
        jax.block_until_ready(outputs[-1:])  # all are ready with one; time it here
        values.update(zip(self._outputs, outputs, strict=True))


def compiled_together(nodes: Sequence[Node], graph: Graph) -> Fragment:
    """Merges consecutive fragments into one; values that only they read stay inside."""
    fragments = [node for node in nodes if isinstance(node, Fragment)]
    made = {value.id for fragment in fragments for value in fragment.outputs}
    taken = {
        value.id: (value, how, aval)
        for fragment in fragments
        for value, how, aval in zip(
            fragment.inputs,
            fragment.arrivals,
            avals_of(fragment.program.jaxpr.invars),
            strict=True,
        )
        if value.id not in made
    }
    outputs = [v for fragment in fragments for v in fragment.outputs if v.id in _read(graph, nodes)]
    inputs = [value for value, _, _ in taken.values()]

    def run(*arrays: jax.Array) -> list[Leaf]:
        values: Values = dict(zip(taken, arrays, strict=True))
        run_fragments(fragments, values)
        return leaves_of(values, outputs)

    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for _, _, aval in taken.values()]
    return Fragment(
        name=" + ".join(fragment.name for fragment in fragments),
        side=fragments[-1].side,
        program=jax.make_jaxpr(run)(*avals),
        inputs=tuple(inputs),
        arrivals=tuple(how for _, how, _ in taken.values()),
        outputs=tuple(outputs),
        flops=sum(fragment.flops for fragment in fragments),
        means=sum(fragment.means for fragment in fragments),
    )


def run_fragments(fragments: Sequence[Fragment], values: Values) -> None:
    """Evaluates fragments in order, as part of a larger program."""
    for fragment in fragments:
        found = jaxpr_as_fun(fragment.program)(*leaves_of(values, fragment.inputs))
        values |= numbered(fragment.outputs, found)


def _read(graph: Graph, nodes: Sequence[Node]) -> set[int]:
    """The numbers of values read outside these nodes."""
    read = {v.id for node in graph.nodes if node not in nodes for v in node.inputs}
    read |= {v.id for v in (*graph.state.outputs, *graph.actor.outputs, *graph.episodes)}
    read |= {v.id for v in graph.tapped}
    return read | {value.id for _, value in graph.metrics}


class PythonProgram:
    """Plain Python on numpy arrays; pieces from several copies are joined before the call."""

    def __init__(self, node: Python) -> None:
        self.name = node.name
        self.moved = None if node.reach is None else node.moved
        """Bytes it transfers over its own connection; None without one."""
        self._node = node
        self._opened: Opened | None = None

    def close(self) -> None:
        """Closes the resource of the function; the next run opens it again."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def run(self, values: Values) -> None:
        """Takes its inputs from `values` and puts its outputs there."""
        try:
            self._run(values)
        except BaseException:
            self.close()
            raise

    def _run(self, values: Values) -> None:
        node, function = self._node, self._node.function
        # Opened at the first run, in the worker's own thread and process.
        if isinstance(function, Opens):
            function = self._opened = self._opened or function.open()
        pairs = zip(node.inputs, node.arrivals, strict=True)
        inputs = [joined_on_host(how, values[value.id]) for value, how in pairs]
        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in node.outputs]
        args, result = node.in_tree.unflatten(inputs), node.out_tree.unflatten(shapes)
        made = run_python(function, args, result, node.where)
        values.update(zip((v.id for v in node.outputs), made, strict=True))


class UnrollProgram:
    """An unroll with JAX environments: acting and stepping in one compiled scan."""

    def __init__(
        self, unroll: Unroll, env: JaxEnv, graph: Graph, device: Device | None = None
    ) -> None:
        self.name = unroll.name
        self._inputs = unroll.inputs + unroll.actor_inputs
        kept = [v for v, live in zip(unroll.trajectory, unroll.live, strict=True) if live]
        self._outputs = [*kept, *unroll.actor_outputs, *unroll.episodes]
        self._device = device

        def call(*inputs: jax.Array) -> list[Leaf]:
            values = numbered(self._inputs, inputs)
            run_unroll(unroll, env, graph, values)
            return leaves_of(values, self._outputs)

        self._call: Callable[..., list[jax.Array]] = jax.jit(call)

    def run(self, values: Values) -> None:
        """Runs `length` steps of every environment."""
        inputs = leaves_of(values, self._inputs)
        if self._device is not None:
            inputs = [to_device(x, self._device) for x in inputs]
        outputs = self._call(*inputs)
        jax.block_until_ready(outputs)
        values |= numbered(self._outputs, outputs)


def _in_place(
    inputs: Sequence[Value], outputs: Sequence[Value], tables: Collection[Side]
) -> list[int]:
    """Positions of table inputs to donate: those with an output of the same shape and dtype."""
    kept = [value for value in outputs if value.side in tables]
    room = Counter((value.shape, value.dtype) for value in kept)
    found: list[int] = []
    for i, value in enumerate(inputs):
        alike = (value.shape, value.dtype)
        # JAX warns of a donated array that no output can reuse.
        if value.side in tables and room[alike]:
            room[alike] -= 1
            found.append(i)
    return found
