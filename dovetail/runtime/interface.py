"""What runs a plan, as the training loop sees it: on this machine, on a cluster, or in a test."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from dovetail.graph.ir import Graph
from dovetail.graph.unroll import ActorState
from dovetail.runtime.report import Pending


class Runtime(Protocol):
    """Runs a plan. Close it: it may hold threads, processes and environments."""

    @property
    def graph(self) -> Graph:
        """What it runs."""
        ...

    @property
    def compile_seconds(self) -> float:
        """How long compiling took, once it is loaded."""
        ...

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds spent so far, by fragment."""
        ...

    def status(self) -> list[dict[str, Any]]:
        """What every worker is at."""
        ...

    def prepare(self, state: Any, actor: Any) -> None:
        """Starts to compile for states of these shapes, in the background."""
        ...

    def load(
        self,
        state: Any,
        actor: ActorState,
        *,
        episode_keys: jax.Array | None = None,
        turn: int = 0,
        watched: Sequence[int] = (),
    ) -> ActorState:
        """Sets what iteration number `turn` starts from, and waits until all is compiled.

        Host environments begin new episodes, each by its key of `episode_keys` (the actors' own
        unless given). Reports say whether the leaves of the state whose positions are `watched` are
        finite. Returns the actors' state as it is then.
        """
        ...

    def refill(self, data: Sequence[Any]) -> None:
        """Sets the recorded steps that the next iterations draw from, while none is under way."""
        ...

    def advance(self, iterations: int) -> Pending:
        """Begins that many iterations; wait for what is returned before the next."""
        ...

    def close(self) -> None:
        """Ends everything that it started; safe to call twice."""
        ...
