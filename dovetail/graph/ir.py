"""The fragmented dataflow graph: a handful of immutable node types.

    graph    = nodes in execution order, the edges between them, the inputs and outputs
    node     = Fragment   a maximal piece of the traced program on one side
             | Unroll     `length` alternating steps of acting and environment: two inner fragments
             | Python     a plain Python function on one side: numpy in, numpy out
    edge     = the values that cross one boundary, from one side to another
    value    = the shape, dtype and side of an array, identified by a number

A graph describes computation and communication. It knows nothing about devices, workers or links.
A side is just a name; only `home`, the side of unmarked state, has a meaning here.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue, ShapedArray
from jax.extend.core import ClosedJaxpr

from dovetail.boundaries import How, Reach, Side
from dovetail.graph.unroll import ActorState
from dovetail.trajectory import Trajectory

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Tree(Protocol[T_co]):
    """The structure of a pytree of type `T_co`: JAX's PyTreeDef, which has no types of its own.

    It is `object` where only the algorithm knows the type.
    """

    @property
    def num_leaves(self) -> int:
        """The number of leaves."""
        ...

    def unflatten(self, leaves: Iterable[object], /) -> T_co:
        """Builds the pytree with these leaves."""
        ...

    def flatten_up_to(self, tree: object, /) -> list[object]:
        """The leaves of a pytree of this structure; whatever takes the place of one is a leaf."""
        ...


@dataclass(frozen=True)
class Arrival:
    """How an input arrives from another side."""

    boundary: str
    source: Side
    how: How


@dataclass(frozen=True)
class Value:
    """An array that a node reads or produces."""

    id: int
    shape: tuple[int, ...]
    dtype: np.dtype
    side: Side

    @property
    def nbytes(self) -> int:
        """Its size in bytes when it crosses a link."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Fragment:
    """A piece of the program on one side: run its jaxpr on `inputs` to get `outputs`."""

    name: str
    side: Side
    program: ClosedJaxpr
    inputs: tuple[Value, ...]
    arrivals: tuple[Arrival | None, ...]
    """For each input, how it arrives from another side; None for a local input. Pieces sent by
    several copies are joined or averaged before the program runs."""
    outputs: tuple[Value, ...]
    flops: int
    means: int
    """Number of data-parallel synchronization points (`mean`) inside."""


@dataclass(frozen=True)
class Python:
    """A plain Python function on one side: numpy arrays in, arrays of the declared shapes out."""

    name: str
    side: Side
    function: Callable[..., object]
    """Takes arguments structured as `in_tree` and returns results structured as `out_tree`."""
    in_tree: Tree[tuple[object, ...]]
    out_tree: Tree[object]
    inputs: tuple[Value, ...]
    arrivals: tuple[Arrival | None, ...]
    outputs: tuple[Value, ...]
    where: str
    """The user's file and line."""
    reach: Reach | None = None
    """The side it talks to over its own connection, if any."""

    @property
    def flops(self) -> int:
        """0: unknown, since only compiled programs are counted."""
        return 0

    @property
    def moved(self) -> int:
        """Bytes it transfers to or from the side in `reach`."""
        if self.reach is None:
            return 0
        return sum(value.nbytes for value in (self.inputs if self.reach.sends else self.outputs))


@dataclass(frozen=True)
class Inner:
    """A fragment inside an unroll. It runs once per step on arguments supplied by the unroll."""

    name: str
    side: Side
    program: ClosedJaxpr | None
    """None for a host environment, which steps outside JAX."""
    flops: int
    captured: int
    """Number of values closed over from the iteration: its first inputs, before the weights."""
    out_tree: Tree[object] | None


@dataclass(frozen=True)
class Unroll:
    """`length` alternating steps of acting and environment.

    A strategy may compile both halves together or place them on different workers.
    """

    name: str
    side: Side
    length: int
    act: Inner
    step: Inner
    bootstrap: Inner | None
    reset: Inner | None
    """The algorithm's `reset_carry`, over all environments of an actor; None to reset carries to
    `initial_carry`. `act` expects carries that are already reset."""
    inputs: tuple[Value, ...]
    """Inputs of the acting fragments besides the actor's own state: values captured by `act`,
    values captured by `bootstrap`, then the weights."""
    actor_inputs: tuple[Value, ...]
    trajectory: tuple[Value, ...]
    actor_outputs: tuple[Value, ...]
    episodes: tuple[Value, ...]
    live: tuple[bool, ...]
    """Which leaves of the trajectory are read. The others are not recorded."""
    trajectory_tree: Tree[Trajectory]
    initial_carry: tuple[np.ndarray, ...]
    """The leaves of one environment's carry at the start of an episode."""
    carry_tree: Tree[object]
    per_step_bytes: tuple[int, int]
    """Bytes per step from actor to environment (actions) and back (observations, rewards)."""

    @property
    def info(self) -> int:
        """Number of logged values of the environments' `info`."""
        return self.episodes[3].shape[-1] // 4 if len(self.episodes) > 3 else 0

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The trajectory, the actors' new state and the finished episodes."""
        return self.trajectory + self.actor_outputs + self.episodes

    def act_inputs(self, inputs: Sequence[T]) -> list[T]:
        """Selects the inputs of `act` from a sequence parallel to `inputs`."""
        skipped = self.bootstrap.captured if self.bootstrap is not None else 0
        return [*inputs[: self.act.captured], *inputs[self.act.captured + skipped :]]

    def bootstrap_inputs(self, inputs: Sequence[T]) -> list[T]:
        """Selects the inputs of `bootstrap` from a sequence parallel to `inputs`."""
        return list(inputs[self.act.captured :])

    @property
    def flops(self) -> int:
        """FLOPs of all steps, including the environment's where known."""
        return self.length * (self.act.flops + self.step.flops)


Node = Fragment | Unroll | Python


@dataclass(frozen=True)
class Edge:
    """The values that cross one boundary, once per iteration."""

    boundary: str
    source: str
    """The node that produces the values, or "state" for the incoming state of a side."""
    targets: tuple[str, ...]
    from_side: Side
    to_side: Side
    how: How
    values: tuple[Value, ...]
    where: str
    """The user's file and line."""

    @property
    def nbytes(self) -> int:
        """Bytes per iteration."""
        return sum(value.nbytes for value in self.values)


@dataclass(frozen=True)
class Slots(Generic[T_co]):
    """A pytree carried from iteration to iteration: the state of the algorithm or of the actors."""

    tree: Tree[T_co]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class Tap:
    """Values of an iteration requested from outside the loop, available on the home side."""

    tree: Tree[object]
    """The structure of `values` as a pytree."""
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Graph:
    """One iteration of an algorithm's loop."""

    algorithm: str
    env: str
    num_envs: int
    """Number of environments that feed one update."""
    actor_envs: int
    """Batch size, in environments, for which the acting side's programs are traced."""
    home: Side
    """The side of metrics and of all unmarked state."""
    tables: tuple[Side, ...]
    """Sides whose state is split among their copies and updated in place."""
    correction: str
    """The algorithm's off-policy correction, in words."""
    staleness: int | None
    """The maximum staleness the algorithm tolerates; None for no limit."""
    threads: bool
    """Whether several threads can step its environments in parallel."""
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    state: Slots[object]
    actor: Slots[ActorState]
    metrics: tuple[tuple[str, Value], ...]
    episodes: tuple[Value, ...]
    """Finished episodes per environment: count, sum of returns, sum of lengths, and the sums of
    logged values, if any."""
    data: tuple[int, ...] = ()
    """Positions of the state leaves that hold recorded steps; iterations only read them."""
    offline_steps: int = 0
    """Gradient steps per iteration of an algorithm that does not act."""
    tap: Tap | None = None
    """Values reported after every iteration besides the metrics."""

    @property
    def tapped(self) -> tuple[Value, ...]:
        """The values of the tap; empty without a tap."""
        return () if self.tap is None else self.tap.values

    def node(self, name: str) -> Node:
        """The node with this name."""
        return next(node for node in self.nodes if node.name == name)

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides that run at least one node, `home` first."""
        found = dict.fromkeys((self.home, *(node.side for node in self.nodes)))
        return tuple(found)

    @property
    def acting(self) -> tuple[Side, ...]:
        """The sides that act; their copies share the environments."""
        return tuple(dict.fromkeys(unroll.side for unroll in self.unrolls))

    def on(self, *sides: Side) -> tuple[Node, ...]:
        """The nodes on these sides, in execution order."""
        return tuple(node for node in self.nodes if node.side in sides)

    @property
    def unrolls(self) -> tuple[Unroll, ...]:
        """The unroll nodes."""
        return tuple(node for node in self.nodes if isinstance(node, Unroll))

    @property
    def reaching(self) -> tuple[Python, ...]:
        """The Python nodes with their own connection to a side."""
        return tuple(n for n in self.nodes if isinstance(n, Python) and n.reach is not None)

    @property
    def fragments(self) -> tuple[str, ...]:
        """The names a plan places: every node, with an unroll as its halves `.act` and `.step`."""
        parts = (
            (f"{node.name}.act", f"{node.name}.step") if isinstance(node, Unroll) else (node.name,)
            for node in self.nodes
        )
        return tuple(name for names in parts for name in names)

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps over all environments; gradient steps for an offline algorithm."""
        if not self.unrolls:
            return self.offline_steps
        return sum(node.length for node in self.unrolls) * self.num_envs


def value_of(aval: AbstractValue, number: int, side: Side) -> Value:
    """A `Value` for an abstract array. A typed random key has the shape of its uint32 words."""
    assert isinstance(aval, ShapedArray)
    dtype = aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, dtype))
        return Value(number, tuple(words.shape), np.dtype(words.dtype), side)
    return Value(number, tuple(aval.shape), np.dtype(dtype), side)
