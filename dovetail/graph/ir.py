"""The fragmented dataflow graph: a handful of immutable node types.

    graph    = nodes in execution order, the edges between them, and what goes in and out
    node     = Fragment   a maximal piece of the traced program on one side
             | Unroll     actors and environments in turn, `length` times; holds two inner fragments
             | Python     a plain Python function on one side: numpy in, numpy out
    edge     = the values that cross one boundary, from one side to another
    value    = an array's shape, dtype and side, named by a number

A graph knows what is computed and what crosses, and nothing of devices, workers, links or copies.
A side is a name: the graph gives a meaning to none but `home`, where unmarked state lives.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue, ShapedArray
from jax.extend.core import ClosedJaxpr

from dovetail.boundaries import How, Reach, Side

T = TypeVar("T")


class Tree(Protocol):
    """The structure of a pytree: what JAX calls a PyTreeDef."""

    @property
    def num_leaves(self) -> int:
        """How many arrays it has."""
        ...

    def unflatten(self, leaves: Iterable[Any], /) -> Any:
        """The pytree with these leaves."""
        ...


@dataclass(frozen=True)
class Arrival:
    """How an input comes to its side from another."""

    boundary: str
    source: Side
    how: How


@dataclass(frozen=True)
class Value:
    """An array that some node makes or takes."""

    id: int
    shape: tuple[int, ...]
    dtype: np.dtype
    side: Side

    @property
    def nbytes(self) -> int:
        """Its size when it crosses a link."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Fragment:
    """A piece of the program on one side: run its jaxpr on `inputs` to get `outputs`."""

    name: str
    side: Side
    program: ClosedJaxpr
    inputs: tuple[Value, ...]
    arrivals: tuple[Arrival | None, ...]
    """For each input, how it comes from another side, if it does: what several copies sent is
    joined or averaged before the program takes it."""
    outputs: tuple[Value, ...]
    flops: int
    means: int
    """How many data-parallel synchronization points (`mean`) it holds."""


@dataclass(frozen=True)
class Python:
    """A plain Python function on one side: takes numpy arrays, and returns arrays as declared."""

    name: str
    side: Side
    function: Callable[..., Any]
    """Takes the arguments in their structure, and returns the results in theirs."""
    in_tree: Tree
    out_tree: Tree
    inputs: tuple[Value, ...]
    arrivals: tuple[Arrival | None, ...]
    outputs: tuple[Value, ...]
    where: str
    """The user's file and line."""
    reach: Reach | None = None
    """The side that it reaches by itself, if it does."""

    @property
    def flops(self) -> int:
        """Not known; what is compiled counts."""
        return 0

    @property
    def moved(self) -> int:
        """Bytes that it brings to or from the side that it reaches."""
        if self.reach is None:
            return 0
        return sum(value.nbytes for value in (self.inputs if self.reach.sends else self.outputs))


@dataclass(frozen=True)
class Inner:
    """A fragment inside an unroll, run once per step on arguments that the unroll supplies."""

    name: str
    side: Side
    program: ClosedJaxpr | None
    """None for a host environment: it steps outside JAX."""
    flops: int
    captured: int
    """How many values of the iteration it captured: its first inputs, before the weights."""
    out_tree: Tree | None


@dataclass(frozen=True)
class Unroll:
    """`length` alternating steps of acting and environment; a strategy may keep both together."""

    name: str
    side: Side
    length: int
    act: Inner
    step: Inner
    bootstrap: Inner | None
    reset: Inner | None
    """The algorithm's own way to reset the carries of episodes that begin, on all of an actor's
    environments; None if they become `initial_carry`. `act` takes carries that are reset."""
    inputs: tuple[Value, ...]
    """What the acting fragments take besides the actor's own state: what `act` captured, what
    `bootstrap` captured, then the weights."""
    actor_inputs: tuple[Value, ...]
    trajectory: tuple[Value, ...]
    actor_outputs: tuple[Value, ...]
    episodes: tuple[Value, ...]
    live: tuple[bool, ...]
    """Which leaves of the trajectory somebody reads; the others are not recorded."""
    trajectory_tree: Tree
    initial_carry: tuple[np.ndarray, ...]
    """The leaves of one environment's carry at an episode's start."""
    carry_tree: Tree
    per_step_bytes: tuple[int, int]
    """Bytes per step that cross actor → environment (actions) and back (observations, rewards)."""

    @property
    def outputs(self) -> tuple[Value, ...]:
        """Everything it makes."""
        return self.trajectory + self.actor_outputs + self.episodes

    def act_inputs(self, inputs: Sequence[T]) -> list[T]:
        """Of things that go with `inputs`, those that `act` takes."""
        skipped = self.bootstrap.captured if self.bootstrap is not None else 0
        return [*inputs[: self.act.captured], *inputs[self.act.captured + skipped :]]

    def bootstrap_inputs(self, inputs: Sequence[T]) -> list[T]:
        """Of things that go with `inputs`, those that `bootstrap` takes."""
        return list(inputs[self.act.captured :])

    @property
    def flops(self) -> int:
        """All steps together, the environment's included where it is known."""
        return self.length * (self.act.flops + self.step.flops)


Node = Fragment | Unroll | Python


@dataclass(frozen=True)
class Edge:
    """What crosses one boundary, once per iteration."""

    boundary: str
    source: str
    """The node that makes the values, or "state" for a side's state as it came in."""
    targets: tuple[str, ...]
    from_side: Side
    to_side: Side
    how: How
    values: tuple[Value, ...]
    where: str
    """The user's file and line."""

    @property
    def nbytes(self) -> int:
        """Bytes that cross per iteration."""
        return sum(value.nbytes for value in self.values)


@dataclass(frozen=True)
class Slots:
    """A pytree that every iteration takes and gives back: the algorithm's or the actors' state."""

    tree: Tree
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class Tap:
    """Values of an iteration that somebody outside the loop asks for, as the home side has them."""

    tree: Tree
    """The pytree that they are the leaves of."""
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Graph:
    """One iteration of an algorithm's loop."""

    algorithm: str
    env: str
    num_envs: int
    """Environments whose steps make one update."""
    actor_envs: int
    """Environments for which one call of the acting side's programs is traced."""
    home: Side
    """The side of metrics, and of all state that is not marked for another."""
    tables: tuple[Side, ...]
    """Sides whose state is divided among their copies and changed in place."""
    correction: str
    """What the algorithm corrects old trajectories with, in words."""
    staleness: int | None
    """How many versions old a trajectory may be; None for any number."""
    threads: bool
    """Whether threads step its environments side by side."""
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    state: Slots
    actor: Slots
    metrics: tuple[tuple[str, Value], ...]
    episodes: tuple[Value, ...]
    """Finished episodes per environment: count, sum of returns, sum of lengths."""
    data: tuple[int, ...] = ()
    """Which leaves of the state are recorded steps: what they hold is given, and never changed."""
    offline_steps: int = 0
    """Gradient steps of an iteration, if nobody acts in it."""
    tap: Tap | None = None
    """What is shown of every iteration besides its metrics."""

    @property
    def tapped(self) -> tuple[Value, ...]:
        """The values of the tap; none if there is no tap."""
        return () if self.tap is None else self.tap.values

    def node(self, name: str) -> Node:
        """The node of that name."""
        return next(node for node in self.nodes if node.name == name)

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides on which something runs, `home` first."""
        found = dict.fromkeys((self.home, *(node.side for node in self.nodes)))
        return tuple(found)

    @property
    def acting(self) -> tuple[Side, ...]:
        """The sides that act in environments: their copies share these."""
        return tuple(dict.fromkeys(unroll.side for unroll in self.unrolls))

    def on(self, *sides: Side) -> tuple[Node, ...]:
        """The nodes of some sides."""
        return tuple(node for node in self.nodes if node.side in sides)

    @property
    def unrolls(self) -> tuple[Unroll, ...]:
        """The nodes in which actors and environments take turns."""
        return tuple(node for node in self.nodes if isinstance(node, Unroll))

    @property
    def reaching(self) -> tuple[Python, ...]:
        """The nodes that reach a side by themselves."""
        return tuple(n for n in self.nodes if isinstance(n, Python) and n.reach is not None)

    @property
    def fragments(self) -> tuple[str, ...]:
        """Everything that a plan places: the fragments, an unroll's two halves apart."""
        parts = (
            (f"{node.name}.act", f"{node.name}.step") if isinstance(node, Unroll) else (node.name,)
            for node in self.nodes
        )
        return tuple(name for names in parts for name in names)

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps, over all environments; gradient steps if nobody acts."""
        if not self.unrolls:
            return self.offline_steps
        return sum(node.length for node in self.unrolls) * self.num_envs


def value_of(aval: AbstractValue, number: int, side: Side) -> Value:
    """A `Value` for an abstract array; a typed random key counts as its uint32 words."""
    assert isinstance(aval, ShapedArray)
    dtype = aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, dtype))
        return Value(number, tuple(words.shape), np.dtype(words.dtype), side)
    return Value(number, tuple(aval.shape), np.dtype(dtype), side)
