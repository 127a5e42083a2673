"""The workers of a process that is not the learner's: stretches of programs, run when asked.

What to run between which links follows from the same plan, so the learner's process and this one
agree on it without a word.
"""

import time
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.envs.resolve import Env
from dovetail.graph.ir import Graph, Side
from dovetail.graph.unroll import ActorState
from dovetail.plan.ir import Plan
from dovetail.runtime.away import Reply, Values
from dovetail.runtime.schedule import Crew
from dovetail.runtime.stage import begin_episodes
from dovetail.runtime.wire import pack, unpack, unpack_all
from dovetail.runtime.worker import Operation, PutAnswer, PutResults, Run, Turn, Worker


class Outworkers:
    """The workers `here` of a plan."""

    def __init__(
        self, graph: Graph, plan: Plan, env: Env, patience: float, here: Collection[str]
    ) -> None:
        self._crew = Crew(graph, plan, env, patience, None, here)
        self._workers = {
            worker.name: _Outworker(graph, env, self._crew, worker) for worker in self._crew.workers
        }

    def begin(self, worker: str, leaves: list[Any], keys: Any) -> list[Any]:
        """Sets an actor's state, and begins episodes; returns its state as it is then."""
        return self._workers[worker].begin(leaves, keys)

    def run(self, worker: str, stretch: int, given: Sequence[Values]) -> Reply:
        """Runs a stretch of a worker's programs."""
        return self._workers[worker].run(stretch, given)

    def hold(self, worker: str, leaves: list[Any]) -> None:
        """Sets a worker's part of the replay."""
        self._workers[worker].hold(leaves)

    def held(self, worker: str) -> list[Any]:
        """A worker's part of the replay."""
        return self._workers[worker].held()

    def pulse(self, worker: str) -> tuple[float, bool, str]:
        """(seconds since it last got on, whether all is compiled, what it is at)."""
        watch = self._workers[worker].worker.watch
        return watch.quiet(), watch.warm, watch.complaint()

    def close(self) -> None:
        """Ends the environments."""
        self._crew.close()


class _Outworker:
    """One worker, stretch by stretch."""

    def __init__(self, graph: Graph, env: Env, crew: Crew, worker: Worker) -> None:
        self.worker = worker
        self._graph, self._env, self._crew = graph, env, crew
        self._stretches = _stretches(worker.schedule, graph)
        self._replay = [v.id for v in graph.state.inputs if v.side is Side.REPLAY]
        self._values: Values = {}
        self._turn = Turn(0)
        self._programs = [p for p, owner in crew.programs.acting if owner is worker]

    def begin(self, leaves: list[Any], keys: Any) -> list[Any]:
        """Sets what the next turn starts from."""
        self.worker.watch.begin()
        self.worker.watch.doing("setting up its environments")
        graph, worker = self._graph, self.worker
        actor: ActorState = graph.actor.tree.unflatten([unpack(leaf) for leaf in leaves])
        stage = self._crew.programs.stages.get(worker.name)
        actor = begin_episodes(self._env, stage, actor, unpack(keys))
        begun = jax.tree.leaves(actor)
        worker.held = dict(zip((v.id for v in graph.actor.inputs), begun, strict=True))
        worker.watch.idle()
        return [pack(leaf) for leaf in begun]

    def hold(self, leaves: list[Any]) -> None:
        """Sets what the next turn starts from, of the replay."""
        self.worker.watch.begin()
        self.worker.watch.doing("taking its part of the replay")
        arrays = [jnp.array(unpack(leaf)) for leaf in leaves]
        self.worker.held = {}
        self.worker.hold(dict(zip(self._replay, arrays, strict=True)))
        self.worker.watch.idle()

    def held(self) -> list[Any]:
        """What the next turn starts from, of the replay."""
        held = self.worker.all_held()
        return [pack(held[number]) for number in self._replay]

    def run(self, stretch: int, given: Sequence[Values]) -> Reply:
        """Runs a stretch; with the first a turn begins, with the last it ends."""
        worker, (programs, wanted, last) = self.worker, self._stretches[stretch]
        worker.watch.begin()
        if stretch == 0:
            for release in self._turn.releases:  # the last turn's arrays have been sent
                release()
            self._values, self._turn = dict(worker.held), Turn(0)
        for values in given:
            self._values.update({number: unpack_all(leaf) for number, leaf in values.items()})
        before, began = self._seconds(), time.perf_counter()
        for program in programs:
            program(worker, self._values, self._turn)
        whole = time.perf_counter() - began
        if last:
            worker.held = worker.kept(self._values)
            worker.watch.warm = True
        worker.watch.idle()
        spent = {name: now - before.get(name, 0.0) for name, now in self._seconds().items()}
        spent["outpost"] = whole - sum(spent.values())
        sent = {number: pack(self._values[number]) for number in wanted}
        clock = began, time.perf_counter()
        return Reply(sent, spent, worker.track.drain(), clock)

    def _seconds(self) -> dict[str, float]:
        """By fragment, an unroll's two halves apart."""
        halves = {program.name for program in self._programs}
        spent = {n: s for n, s in self.worker.seconds.items() if n not in halves}
        for program in self._programs:
            spent |= program.seconds
        return spent


def _stretches(
    schedule: Sequence[Operation], graph: Graph
) -> list[tuple[list[Operation], list[int], bool]]:
    """(programs, what is sent after them, whether the turn ends with them) of every stretch."""
    found: list[tuple[list[Operation], list[int], bool]] = []
    for is_run, group in groupby(schedule, key=lambda operation: isinstance(operation, Run)):
        operations = list(group)
        if is_run:
            found.append((operations, [], False))
        elif found:
            programs, wanted, last = found[-1]
            puts = [o for o in operations if isinstance(o, PutResults | PutAnswer)]
            wanted += [number for put in puts for number in put.numbers]
            last = any(isinstance(put, PutResults) and put.last for put in puts)
            wanted += [v.id for v in (*graph.actor.outputs, *graph.episodes)] if last else []
            found[-1] = programs, list(dict.fromkeys(wanted)), last
    programs, wanted, _ = found[-1]
    return [*found[:-1], (programs, wanted, True)]
