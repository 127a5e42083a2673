"""What a runtime says of some iterations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from dovetail.telemetry.spans import Span


class UpdatePart(NamedTuple):
    """Who made a part of what an update took."""

    actor: int
    turn: int
    """The number of the actor's unroll; one follows the other unless something was dropped."""
    staleness: int
    """How many versions old the weights were."""


class Tapped(NamedTuple):
    """What the graph's tap shows of one update."""

    values: Sequence[Any]
    parts: Sequence[UpdatePart] = ()
    """Who made each of the equal parts of the values, in the order of their environments; empty
    where the newest weights made all of it, in one place."""


@dataclass(frozen=True)
class Report:
    """What some iterations did, and the states that they ended with."""

    iterations: int
    metrics: dict[str, Any]
    """Sums over the iterations; scalars, or [seeds]."""
    episodes: list[Any]
    """Counts, returns and lengths of finished episodes, per environment."""
    state: Callable[..., Any]
    """Gives the learner's state after them. What a replay holds changes while a run goes on:
    `state(replay=False)` may leave it out, with None for its arrays."""
    actor: Callable[[], Any]
    """Puts the actors' state after them together."""
    measures: dict[str, float] = field(default_factory=dict)
    """What the workers and links measured: staleness, waits, the size of acting's batches."""
    spans: Mapping[str, list[Span]] = field(default_factory=dict)
    """What each worker did since the report before, on this process's clock."""
    dropped_spans: int = 0
    """Of all so far, those that a full buffer forgot."""
    finite: bool = True
    """Whether every number is finite in the watched leaves of the state."""
    taps: Sequence[Tapped] = ()
    """Of each iteration, if the graph has a tap."""


class Pending(Protocol):
    """Iterations that are on their way."""

    def wait(self) -> Report:
        """Waits until they are done; raises what ended them, naming the worker."""
        ...


def all_finite(leaves: Sequence[Any], watched: Sequence[int]) -> bool:
    """Whether no watched leaf of floats has a NaN or an infinity in it."""
    floats = [leaves[i] for i in watched if jnp.issubdtype(leaves[i].dtype, jnp.floating)]
    return all(np.isfinite(np.asarray(x)).all() for x in floats)


def sums(rows: list[list[Any]]) -> list[Any]:
    """Every column summed."""
    return [np.sum([np.asarray(x) for x in column], axis=0) for column in zip(*rows, strict=True)]
