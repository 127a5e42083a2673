"""The graphs of one algorithm on one task, for any number of copies of its sides.

A plan states the number of copies per side. The programs of a copy work on its share of the batch.
Each division is traced once and cached, so comparing many plans costs only a few traces.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from dovetail.algorithm import Algorithm, Task
from dovetail.boundaries import REPLAY, Side
from dovetail.envs.interface import JaxEnv
from dovetail.graph.ir import Graph
from dovetail.graph.taps import Wanted, tap
from dovetail.graph.trace import trace

Division = tuple[tuple[tuple[Side, int], ...], int, int | None]
"""(copies of each side, environments per update, environments per call of acting)."""


class Graphs:
    """Traces an algorithm's loop for the number of copies in a plan; keeps every trace."""

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        env: JaxEnv | None = None,
        wanted: Wanted | None = None,
    ) -> None:
        """`task` is the undivided task. `env` is None for host environments. With `wanted`, every
        graph is tapped for these leaves of the trajectory."""
        self._algorithm, self._task, self._env, self._wanted = algorithm, task, env, wanted
        self._traced: dict[Division, Graph] = {}

    @cached_property
    def whole(self) -> Graph:
        """The graph with one copy of every side, as strategies see it."""
        return self.at({}, self._task.num_envs)

    def at(self, copies: Mapping[Side, int], num_envs: int, batch: int | None = None) -> Graph:
        """The graph of one share, given the number of copies of each side.

        `num_envs` environments feed one update. One call of acting serves `batch` environments,
        by default all of an actor's.
        """
        several = {side: count for side, count in sorted(copies.items()) if count > 1}
        division = tuple(several.items()), num_envs, batch
        if division not in self._traced:
            shards = several.get(REPLAY, 1)
            task = replace(self._task, num_envs=num_envs, shards=shards)
            graph = trace(self._algorithm, task, self._env, several, batch)
            self._traced[division] = graph if self._wanted is None else tap(graph, self._wanted)
        return self._traced[division]
