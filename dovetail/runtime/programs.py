"""The programs that workers run. Each reads its inputs from a dict of values by number and writes
its outputs there.

`iteration` evaluates a whole graph as one pure function, for plans with only fused links.
`FragmentProgram` is one fragment compiled alone. Unrolls with host environments are in
`host_unroll.py`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec

from dovetail.boundaries import BATCH_AXIS, How, Side
from dovetail.envs import batched
from dovetail.envs.interface import JaxEnv
from dovetail.graph.ir import Arrival, Fragment, Graph, Node, Python, Slots, Unroll, Value
from dovetail.graph.marks import Opened, Opens, run_python
from dovetail.graph.primitives import REPLICA_AXIS, part
from dovetail.graph.unroll import ActorState, Reset, masked_reset, resetting, unroll_scan
from dovetail.runtime.devices import (
    BY_ENVIRONMENT,
    PER_REPLICA,
    WHOLE,
    Device,
    mesh_of,
    own_devices,
    replicated,
    split_over,
    to_device,
)
from dovetail.runtime.packing import Bundle, Key, Values

NO_COPIES: Mapping[Side, int] = MappingProxyType({})
Leaves = list[jax.Array]


Pieces = Callable[[Arrival], int]
"""The number of pieces in which an input arrives: one from each sending copy."""


class FragmentProgram:
    """One fragment, compiled alone.

    The program itself joins pieces from several copies, and updates tables in place.
    """

    def __init__(
        self,
        fragment: Fragment,
        pieces: Pieces = lambda _: 1,
        device: Device | None = None,
        hosted: Collection[Side] = (),
        bundles: Sequence[Bundle] = (),
        state: Slots | None = None,
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

        def joined(*inputs: Any) -> Any:
            given: list[Any] = [None] * len(fragment.inputs)
            for i, value in zip(alone, map(_join, arrivals, inputs), strict=False):
                given[i] = value
            leaves: Values = {}
            for bundle, array in zip(bundles, inputs[len(alone) :], strict=True):
                numbers = (value.id for value in bundle.taken)
                leaves.update(zip(numbers, bundle.unpack(array), strict=True))
            for i, value in enumerate(fragment.inputs):  # one value may cross two boundaries
                given[i] = leaves.get(value.id, given[i])
            found = function(*given)
            together = [b.pack([found[ends[value.id]] for value in b.made]) for b in kept]
            return [found[i] for i in shown] + together

        in_place = _in_place([fragment.inputs[i] for i in alone], fragment.outputs, tables)
        self._call: Callable[..., Any] = jax.jit(joined, donate_argnums=in_place)
        avals: list[Any] = [fragment.program.jaxpr.invars[i].aval for i in alone]
        self._shapes = [
            _sent(aval, how, pieces) for aval, how in zip(avals, arrivals, strict=True)
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

    def _zero(self, shape: jax.ShapeDtypeStruct, outside: bool) -> Any:
        """Zeros like the real input: jit caches by the kind of array and its device."""
        if outside and not jnp.issubdtype(shape.dtype, jax.dtypes.extended):
            return np.zeros(shape.shape, shape.dtype)
        zero = jnp.zeros(shape.shape, shape.dtype)
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
        value.id: (value, how, var.aval)
        for fragment in fragments
        for value, how, var in zip(
            fragment.inputs, fragment.arrivals, fragment.program.jaxpr.invars, strict=True
        )
        if value.id not in made
    }
    outputs = [v for fragment in fragments for v in fragment.outputs if v.id in _read(graph, nodes)]
    inputs = [value for value, _, _ in taken.values()]

    def run(*arrays: Any) -> list[Any]:
        values: Values = dict(zip(taken, arrays, strict=True))
        for fragment in fragments:
            found = jaxpr_as_fun(fragment.program)(*[values[v.id] for v in fragment.inputs])
            values.update(zip((v.id for v in fragment.outputs), found, strict=True))
        return [values[v.id] for v in outputs]

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
        if isinstance(function, Opens):
            function = self._opened = self._opened or function.open()
        pairs = zip(node.inputs, node.arrivals, strict=True)
        inputs = [_joined_on_host(how, values[value.id]) for value, how in pairs]
        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in node.outputs]
        args, result = node.in_tree.unflatten(inputs), node.out_tree.unflatten(shapes)
        made = run_python(function, args, result, node.where)
        values.update(zip((v.id for v in node.outputs), made, strict=True))


def _joined_on_host(how: Arrival | None, value: Any) -> np.ndarray:
    if not isinstance(value, list):
        return np.asarray(value)
    pieces = [np.asarray(piece) for piece in value]
    if how is not None and how.how is How.MEAN:
        return np.mean(pieces, axis=0, dtype=pieces[0].dtype)
    return np.concatenate(pieces, axis=BATCH_AXIS)


class ReplicatedProgram:
    """One learner fragment on several devices.

    Joined arrays are sharded by environment or item, the learner's state is replicated, and `mean`
    is a collective.
    """

    def __init__(
        self, fragment: Fragment, graph: Graph, devices: Sequence[Device], pieces: Pieces
    ) -> None:
        self.name = fragment.name
        self._inputs = [value.id for value in fragment.inputs]
        self._outputs = [value.id for value in fragment.outputs]
        self._arrivals = fragment.arrivals
        self._mesh = mesh_of(devices)
        self._avals: list[Any] = [var.aval for var in fragment.program.jaxpr.invars]
        self._pieces = pieces
        self._split = {
            value.id
            for edge in graph.edges
            if edge.from_side == fragment.side and edge.how is How.JOIN
            for value in edge.values
        }
        metrics = {value.id for _, value in graph.metrics}
        shared = {value.id for slot in (graph.state.inputs, graph.state.outputs) for value in slot}
        shared |= metrics | {v.id for edge in graph.edges for v in edge.values}
        inward = [self._spec(value.id, how, shared) for value, how in self._arriving(fragment)]
        outward = [self._spec(value.id, None, shared) for value in fragment.outputs]
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

        sharded = jax.shard_map(
            replica,
            mesh=self._mesh,
            in_specs=tuple(inward),
            out_specs=outward,
            check_vma=False,
        )

        def joined(*inputs: Any) -> Any:
            pairs = zip(self._arrivals, inputs, strict=True)
            return sharded(*[x if _comes_split(how) else _join(how, x) for how, x in pairs])

        self._call: Callable[..., Any] = jax.jit(joined)

    def _arriving(self, fragment: Fragment) -> list[tuple[Value, Arrival | None]]:
        return list(zip(fragment.inputs, fragment.arrivals, strict=True))

    def _spec(self, number: int, how: Arrival | None, shared: set[int]) -> PartitionSpec:
        if _comes_split(how) or (how is None and number in self._split):
            return BY_ENVIRONMENT
        return WHOLE if how is not None or number in shared else PER_REPLICA

    def compile(self) -> None:
        """Compiles by one call on zeros."""
        replicas = len(own_devices(self._mesh))
        values: Values = {}
        for number, how, aval in zip(self._inputs, self._arrivals, self._avals, strict=True):
            whole = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
            if _comes_split(how):
                whole = _longer(whole, replicas)
            sent = _sent(whole, how, self._pieces)
            values[number] = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sent)
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

    def _placed(self, value: Any, how: Arrival | None) -> Any:
        if _comes_split(how):
            return split_over(value, self._mesh)
        if isinstance(value, list):
            return [replicated(piece, self._mesh) for piece in value]
        if isinstance(value, jax.Array) and value.sharding.device_set == set(
            self._mesh.devices.flat
        ):
            return value
        return replicated(value, self._mesh)


class UnrollProgram:
    """An unroll with JAX environments: acting and stepping in one compiled scan."""

    def __init__(
        self, unroll: Unroll, env: JaxEnv, graph: Graph, device: Device | None = None
    ) -> None:
        self.name = unroll.name
        self._inputs = [value.id for value in unroll.inputs + unroll.actor_inputs]
        kept = [v for v, live in zip(unroll.trajectory, unroll.live, strict=True) if live]
        self._outputs = [v.id for v in (*kept, *unroll.actor_outputs, *unroll.episodes)]
        self._device = device

        def call(*inputs: Any) -> list[Any]:
            values: Values = dict(zip(self._inputs, inputs, strict=True))
            run_unroll(unroll, env, graph, values)
            return [values[number] for number in self._outputs]

        self._call = jax.jit(call)

    def run(self, values: Values) -> None:
        """Runs `length` steps of every environment."""
        inputs = [values[number] for number in self._inputs]
        if self._device is not None:
            inputs = [to_device(x, self._device) for x in inputs]
        outputs = self._call(*inputs)
        jax.block_until_ready(outputs)
        values.update(zip(self._outputs, outputs, strict=True))


def _in_place(
    inputs: Sequence[Value], outputs: Sequence[Value], tables: Collection[Side]
) -> list[int]:
    """Positions of table inputs to donate: those with an output of the same shape and dtype."""
    kept = [value for value in outputs if value.side in tables]
    room = Counter((value.shape, value.dtype) for value in kept)
    found: list[int] = []
    for i, value in enumerate(inputs):
        alike = (value.shape, value.dtype)
        if value.side in tables and room[alike]:
            room[alike] -= 1
            found.append(i)
    return found


def _sent(aval: Any, how: Arrival | None, pieces: Pieces) -> Any:
    """The shape of an arriving input; a list of shapes if several copies send pieces."""
    count = 1 if how is None else pieces(how)
    if how is None or count == 1:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    shape = list(aval.shape)
    if how.how is How.JOIN:
        shape[BATCH_AXIS] //= count
    return [jax.ShapeDtypeStruct(tuple(shape), aval.dtype)] * count


def _longer(shape: jax.ShapeDtypeStruct, times: int) -> jax.ShapeDtypeStruct:
    """The shape of the whole, given the equal part of each of `times` replicas."""
    sizes = list(shape.shape)
    sizes[BATCH_AXIS] *= times
    return shape.update(shape=tuple(sizes))


def _comes_split(how: Arrival | None) -> bool:
    """Whether an input arrives sharded among the replicas."""
    return how is not None and how.how in (How.JOIN, How.DIVIDE)


def _join(how: Arrival | None, value: Any) -> Any:
    """Joins the pieces of several copies along the batch axis, or averages them."""
    if not isinstance(value, list):
        return value
    if how is not None and how.how is How.JOIN:
        return jnp.concatenate(value, axis=BATCH_AXIS)
    return (sum(value[1:], start=value[0]) / len(value)).astype(value[0].dtype)


def _averaged(metric: jax.Array) -> jax.Array:
    return jax.lax.pmean(metric, REPLICA_AXIS)


def act_function(unroll: Unroll, inputs: Sequence[Any]) -> Callable[..., Any]:
    """(params, carry, timestep, keys) → (action, extras, carry) with `inputs` filled in."""
    return _inner_function(unroll.act.program, unroll.act.out_tree, unroll.act_inputs(inputs))


def reset_function(unroll: Unroll, default: Callable[[Any], Reset] = masked_reset) -> Reset:
    """(carry, first) → carry: the algorithm's `reset_carry`, or else `default(initial carry)`."""
    if unroll.reset is None:
        return default(unroll.carry_tree.unflatten(unroll.initial_carry))
    assert unroll.reset.program is not None
    function = jaxpr_as_fun(unroll.reset.program)

    def reset(carry: Any, first: jax.Array) -> Any:
        return unroll.carry_tree.unflatten(function(*jax.tree.leaves(carry), first))

    return reset


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
    """Runs a compiled unroll as part of a larger program; writes its outputs to `values`."""
    inputs = [values[value.id] for value in unroll.inputs]
    actor: ActorState = graph.actor.tree.unflatten([values[v.id] for v in unroll.actor_inputs])
    trajectory, actor, episodes = unroll_scan(
        resetting(act_function(unroll, inputs), reset_function(unroll)),
        lambda state, action, keys: batched.step(env, state, action, keys),
        bootstrap_function(unroll, inputs),
        unroll.length,
        (),  # the weights are among the inputs that are filled in
        actor,
    )
    outputs = [*jax.tree.leaves(trajectory), *jax.tree.leaves(actor), *episodes]
    numbers = [value.id for value in unroll.outputs]
    values.update(zip(numbers, outputs, strict=True))


def iteration(
    graph: Graph, env: JaxEnv | None, copies: Mapping[Side, int] = NO_COPIES
) -> Callable[[Leaves, Leaves], tuple[Any, ...]]:
    """One iteration of the whole graph as a function of leaves.

    (state, actor) → (state, actor, metrics, episodes, tapped values). `env` is None only for an
    offline algorithm. With `copies`, the function is one replica's part, for `shard_map`.
    """

    def taken(node: Fragment, values: Values) -> list[Any]:
        pairs = zip(node.inputs, node.arrivals, strict=True)
        takers = copies.get(node.side, 1)
        return [
            values[value.id]
            if how is None
            else _brought(values[value.id], how.how, copies.get(how.source, 1), takers)
            for value, how in pairs
        ]

    def run(state: Leaves, actor: Leaves) -> tuple[Leaves, ...]:
        values: Values = dict(zip((v.id for v in graph.state.inputs), state, strict=True))
        values.update(zip((v.id for v in graph.actor.inputs), actor, strict=True))
        for node in graph.nodes:
            if isinstance(node, Unroll):
                assert env is not None
                run_unroll(node, env, graph, values)
            else:
                assert isinstance(node, Fragment)
                outputs = jaxpr_as_fun(node.program)(*taken(node, values))
                values.update(zip((v.id for v in node.outputs), outputs, strict=True))
        return (
            [values[v.id] for v in graph.state.outputs],
            [values[v.id] for v in graph.actor.outputs],
            [values[v.id] for _, v in graph.metrics],
            [values[v.id] for v in graph.episodes],
            [values[v.id] for v in graph.tapped],
        )

    return run


def _brought(value: Any, how: How, senders: int, takers: int) -> Any:
    """Moves a value between copies that are replicas of one program.

    Every replica computes a side with a single copy.
    """
    if how is How.DIVIDE or (how is How.JOIN and senders < takers):
        return part(value, takers)
    if how is How.JOIN and senders > takers:
        return jax.lax.all_gather(value, REPLICA_AXIS, axis=BATCH_AXIS, tiled=True)
    return value


class Parts:
    """Splits the state into changing leaves and recorded steps.

    Iterations only read recorded steps. Programs do not return them, since that would copy them.
    """

    def __init__(self, graph: Graph) -> None:
        self._data = frozenset(graph.data)

    def apart(self, state: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Splits the leaves of a state into (changing, recorded)."""
        changing = [leaf for i, leaf in enumerate(state) if i not in self._data]
        return changing, [leaf for i, leaf in enumerate(state) if i in self._data]

    def whole(self, changing: Sequence[Any], data: Sequence[Any]) -> list[Any]:
        """Inverse of `apart`."""
        rest, recorded = iter(changing), iter(data)
        total = len(changing) + len(data)
        return [next(recorded if i in self._data else rest) for i in range(total)]


def many_iterations(
    graph: Graph, env: JaxEnv | None, copies: Mapping[Side, int] = NO_COPIES
) -> Callable[..., tuple[Any, ...]]:
    """`count` iterations in one dispatch.

    Metrics and episodes are summed over the iterations; tapped values are those of the last one.
    """
    once, parts = iteration(graph, env, copies), Parts(graph)

    def run(state: Leaves, data: Leaves, actor: Leaves, count: jax.Array) -> tuple[Any, ...]:
        def step(state: Leaves, actor: Leaves) -> tuple[Any, ...]:
            state, *rest = once(parts.whole(state, data), actor)
            return (parts.apart(state)[0], *rest)

        # The loop carries the sums, so it needs zeros of their shapes to start with.
        shapes = jax.eval_shape(step, state, actor)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[2:])

        def body(_: jax.Array, loop: tuple[Any, ...]) -> tuple[Any, ...]:
            state, actor, *sums, _ = loop
            state, actor, *new, tapped = step(state, actor)
            return (state, actor, *jax.tree.map(jnp.add, sums, new), tapped)

        return jax.lax.fori_loop(0, count, body, (state, actor, *zeros))

    return run


def over_seeds(program: Callable[..., Any]) -> Callable[..., Any]:
    """Maps the program over a leading axis of seeds, which share the recorded steps."""
    return jax.vmap(program, in_axes=(0, None, 0, None))


def over_devices(
    program: Callable[..., Any], devices: Sequence[Any], divided: Sequence[bool]
) -> Callable[..., Any]:
    """Shards the program over several devices.

    Environments are split, and so are the `divided` leaves of the state, along a leading axis. The
    other leaves are replicated.
    """
    mesh = mesh_of(devices)
    specs = [PER_REPLICA if split else WHOLE for split in divided]

    def replica(state: Leaves, data: Leaves, actor: Leaves, count: jax.Array) -> tuple[Any, ...]:
        own = [leaf[0] if split else leaf for leaf, split in zip(state, divided, strict=True)]
        own, actor, metrics, episodes, _ = program(own, data, actor, count)
        state = [leaf[None] if split else leaf for leaf, split in zip(own, divided, strict=True)]
        return state, actor, jax.lax.pmean(metrics, REPLICA_AXIS), episodes, []

    return jax.shard_map(
        replica,
        mesh=mesh,
        in_specs=(specs, WHOLE, PER_REPLICA, WHOLE),
        out_specs=(specs, PER_REPLICA, WHOLE, PER_REPLICA, WHOLE),
        check_vma=False,
    )
