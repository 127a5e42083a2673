"""The interface between the training loop and a runtime, local or on a cluster."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import jax

from dovetail.graph.ir import Graph
from dovetail.graph.unroll import ActorState
from dovetail.runtime.arrays import Leaf
from dovetail.runtime.heartbeat import Activity
from dovetail.runtime.report import Pending


class Runtime(Protocol):
    """Runs a plan. Close it: it may own threads, processes and environments."""

    @property
    def graph(self) -> Graph:
        """The graph it runs."""
        ...

    @property
    def compile_seconds(self) -> float:
        """Compile time in seconds, known after `load`."""
        ...

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds spent so far, by fragment."""
        ...

    def status(self) -> list[Activity]:
        """The current activity of every worker."""
        ...

    def prepare(self, state: object, actor: ActorState) -> None:
        """Starts compiling for states of these shapes, in the background."""
        ...

    def load(
        self,
        state: object,
        actor: ActorState,
        *,
        episode_keys: jax.Array | None = None,
        turn: int = 0,
        watched: Sequence[int] = (),
    ) -> ActorState:
        """Sets the states at iteration `turn` and waits until everything is compiled.

        Host environments begin new episodes with `episode_keys` [num_envs], by default the actors'
        keys. Reports state whether the leaves of the state at positions `watched` are finite.
        Returns the actors' state, with the first observations of host environments.
        """
        ...

    def refill(self, data: Sequence[Leaf]) -> None:
        """Replaces the recorded steps that iterations sample; no iteration may be running."""
        ...

    def advance(self, iterations: int) -> Pending:
        """Starts that many iterations; wait for the result before the next call."""
        ...

    def ask_to_stop(self) -> None:
        """Announces the end: what hangs is ended soon and nothing is restarted from now on.

        A signal handler may call it.
        """
        ...

    def close(self) -> None:
        """Stops everything it started; safe to call twice."""
        ...
