"""The report of a runtime on a number of iterations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from dovetail.graph.unroll import ActorState
from dovetail.runtime.arrays import Leaf
from dovetail.telemetry.spans import Span


class UpdatePart(NamedTuple):
    """The origin of one actor's part of an update."""

    actor: int
    turn: int
    """The number of the actor's unroll; consecutive unless unrolls were dropped."""
    staleness: int
    """Staleness of the weights, in versions."""


class Tapped(NamedTuple):
    """The tapped values of one update."""

    values: Sequence[Leaf]
    parts: Sequence[UpdatePart] = ()
    """The origin of each equal part of the values, in the order of the environments; empty if the
    latest weights produced all of them on one worker."""


class StateGetter(Protocol):
    """Access to the state after some iterations."""

    def __call__(self, replay: bool = True) -> Any:
        """The algorithm's state, whose type only the algorithm knows.

        A replay keeps changing during a run, so its arrays may be None without `replay`.
        """
        ...


@dataclass(frozen=True)
class Report:
    """The results of some iterations, and access to the states after them."""

    iterations: int
    metrics: Mapping[str, Leaf]
    """Sums over the iterations; scalars, or [seeds]."""
    episodes: Sequence[Leaf]
    """Number, returns and lengths of finished episodes, each per environment; empty if the
    algorithm does not act."""
    state: StateGetter
    """Returns the state after them."""
    actor: Callable[[], ActorState]
    """Returns the actors' state after them."""
    measures: dict[str, float] = field(default_factory=dict)
    """Measures of workers and links: staleness, restarts, the batch size of acting."""
    spans: Mapping[str, list[Span]] = field(default_factory=dict)
    """The spans of each worker since the last report, on the clock of this process."""
    dropped_spans: int = 0
    """Total number of spans lost to a full buffer so far."""
    finite: bool = True
    """Whether all watched leaves of the state are finite."""
    taps: Sequence[Tapped] = ()
    """One per iteration, if the graph has a tap."""


class Pending(Protocol):
    """Iterations in progress."""

    def wait(self) -> Report:
        """Waits for them; raises the error of a failed worker, naming it."""
        ...


def all_finite(leaves: Sequence[Leaf | None], watched: Sequence[int]) -> bool:
    """Whether the watched floating-point leaves contain no NaN or infinity."""
    found = [leaf for i in watched if (leaf := leaves[i]) is not None]
    floats = [leaf for leaf in found if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return all(np.isfinite(np.asarray(leaf)).all() for leaf in floats)


def sums(rows: Sequence[Sequence[Leaf]]) -> list[np.ndarray]:
    """Sums the rows elementwise."""
    columns = zip(*rows, strict=True)
    return [np.asarray(np.sum([np.asarray(x) for x in column], axis=0)) for column in columns]
