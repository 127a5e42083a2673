"""The graphs of one algorithm on one task: of the whole, and of the shares of any number of copies.

A plan says how many copies each side has; the programs of a copy work on its share of the batch.
Each division is traced once, so that many plans can be compared for the price of a few traces.
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
"""Copies, environments of an update, and how many of them one call of acting serves."""


class Graphs:
    """Traces an algorithm's loop for as many copies of its sides as a plan asks for."""

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        env: JaxEnv | None = None,
        wanted: Wanted | None = None,
    ) -> None:
        """`task` is the whole; `env` is None when the environments live on the host. What is
        `wanted` of the trajectories is tapped in each graph."""
        self._algorithm, self._task, self._env, self._wanted = algorithm, task, env, wanted
        self._traced: dict[Division, Graph] = {}

    @cached_property
    def whole(self) -> Graph:
        """The graph with one copy of every side: what a strategy places."""
        return self.at({}, self._task.num_envs)

    def at(self, copies: Mapping[Side, int], num_envs: int, batch: int | None = None) -> Graph:
        """The graph of the shares of so many copies, of which `num_envs` environments make an
        update, and one call of acting serves `batch` of them."""
        several = {side: count for side, count in sorted(copies.items()) if count > 1}
        division = tuple(several.items()), num_envs, batch
        if division not in self._traced:
            shards = several.get(REPLAY, 1)
            task = replace(self._task, num_envs=num_envs, shards=shards)
            graph = trace(self._algorithm, task, self._env, several, batch)
            self._traced[division] = graph if self._wanted is None else tap(graph, self._wanted)
        return self._traced[division]
