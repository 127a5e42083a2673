"""The one-machine runtime: builds the programs of a plan and runs them round and round.

If every link is fused, the whole iteration is one program and many iterations go in one dispatch,
which returns before it is done; otherwise each fragment is a program of its own and the worker
runs them in the graph's order. Nothing here knows what an algorithm or a policy is.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from dovetail.envs.interface import HostEnv, JaxEnv
from dovetail.graph.ir import Graph, Unroll
from dovetail.plan.ir import LinkKind, Plan
from dovetail.runtime.host import HostStepper, HostUnroll, JaxStepper
from dovetail.runtime.programs import (
    FragmentProgram,
    Values,
    many_iterations,
    over_devices,
    over_seeds,
)


class Report(NamedTuple):
    """What some iterations did. Arrays may still be on their way: reading them waits."""

    iterations: int
    metrics: dict[str, Any]
    """Sums over the iterations; scalars, or [seeds]."""
    episodes: list[Any]
    """Counts, returns and lengths of finished episodes, per environment."""


class Runtime:
    """Runs a plan. Holds the learner's and the actors' state between calls of `advance`."""

    def __init__(self, graph: Graph, plan: Plan, env: JaxEnv | HostEnv, seeds: int = 1) -> None:
        self.graph = graph
        self.plan = plan
        self.compile_seconds = 0.0
        self._state: list[Any] = []
        self._actor: list[Any] = []
        self._compiling: Future[float] | None = None
        fused = all(link.kind is LinkKind.FUSED for link in plan.links)
        self._worker: _FusedWorker | _StepWorker = (
            _FusedWorker(graph, plan, env, seeds) if fused else _StepWorker(graph, env)
        )

    @property
    def asynchronous(self) -> bool:
        """Whether `advance` returns before the work is done."""
        return isinstance(self._worker, _FusedWorker)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent so far, by fragment."""
        return self._worker.seconds

    def prepare(self, state: Any, actor: Any) -> None:
        """Starts to compile for states of these shapes, in the background."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="dovetail-compile")
        arguments = jax.tree.leaves(state), jax.tree.leaves(actor)
        self._compiling = pool.submit(_timed, self._worker.compile, *arguments)
        pool.shutdown(wait=False)

    def load(self, state: Any, actor: Any) -> None:
        """Sets what the next iteration starts from, and waits until all is compiled."""
        if self._compiling is None:
            self.prepare(state, actor)
        self._state = jax.tree.leaves(state)
        self._actor = jax.tree.leaves(actor)
        warm_up = _timed(self._worker.warm_up, self._state, self._actor)
        assert self._compiling is not None
        self.compile_seconds = max(warm_up, self._compiling.result())

    @property
    def state(self) -> Any:
        """The learner's state after the iterations so far."""
        return self.graph.state.tree.unflatten(self._state)

    @property
    def actor(self) -> Any:
        """The actors' state after the iterations so far."""
        return self.graph.actor.tree.unflatten(self._actor)

    def advance(self, iterations: int) -> Report:
        """Runs that many iterations."""
        self._state, self._actor, metrics, episodes = self._worker.run(
            self._state, self._actor, iterations
        )
        names = [name for name, _ in self.graph.metrics]
        return Report(iterations, dict(zip(names, metrics, strict=True)), episodes)


class _FusedWorker:
    """One program for the whole iteration."""

    def __init__(self, graph: Graph, plan: Plan, env: Any, seeds: int) -> None:
        program = many_iterations(graph, env)
        if seeds > 1:
            program = over_seeds(program)
        if plan.replicas > 1:
            devices = jax.devices()
            program = over_devices(program, [devices[i] for i in plan.workers[0].devices])
        self.seconds: dict[str, float] = {}
        self._call: Callable[..., Any] = jax.jit(program)

    def compile(self, state: list[Any], actor: list[Any]) -> None:
        """Compiles for arguments of these shapes."""
        self._call = self._call.lower(state, actor, np.int32(1)).compile()  # type: ignore[attr-defined]

    def warm_up(self, state: list[Any], actor: list[Any]) -> None:
        """Nothing is left to compile."""

    def run(self, state: list[Any], actor: list[Any], count: int) -> tuple[Any, ...]:
        """`count` iterations; metrics and episodes summed."""
        return self._call(state, actor, np.int32(count))


class _StepWorker:
    """One program per fragment, environments on the host."""

    def __init__(self, graph: Graph, env: JaxEnv | HostEnv) -> None:
        self._graph = graph

        def make_stepper(state: Any, keys: Any) -> HostStepper | JaxStepper:
            return HostStepper(env) if isinstance(env, HostEnv) else JaxStepper(env, state, keys)

        self._programs: list[HostUnroll | FragmentProgram] = [
            HostUnroll(node, graph, make_stepper)
            if isinstance(node, Unroll)
            else FragmentProgram(node)
            for node in graph.nodes
        ]
        self._spent = {program.name: 0.0 for program in self._programs}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by fragment, an unroll's two halves apart."""
        found: dict[str, float] = {}
        for program in self._programs:
            halves = program.seconds if isinstance(program, HostUnroll) else None
            found |= halves or {program.name: self._spent[program.name]}
        return found

    def compile(self, state: list[Any], actor: list[Any]) -> None:
        """Compiles every fragment; their shapes are the graph's."""
        for program in self._programs:
            if isinstance(program, FragmentProgram):
                program.compile()

    def warm_up(self, state: list[Any], actor: list[Any]) -> None:
        """Compiles the acting programs, where all they take is there before an iteration."""
        values = self._values(state, actor)
        for program in self._programs:
            if isinstance(program, HostUnroll) and program.can_warm_up(values):
                program.warm_up(values)

    def _values(self, state: list[Any], actor: list[Any]) -> Values:
        graph = self._graph
        values: Values = dict(zip((v.id for v in graph.state.inputs), state, strict=True))
        values.update(zip((v.id for v in graph.actor.inputs), actor, strict=True))
        return values

    def run(self, state: list[Any], actor: list[Any], count: int) -> tuple[Any, ...]:
        """`count` iterations; metrics and episodes summed."""
        graph = self._graph
        metrics: list[list[Any]] = []
        episodes: list[Any] = []
        for _ in range(count):
            values = self._values(state, actor)
            for program in self._programs:
                began = time.perf_counter()
                program.run(values)
                self._spent[program.name] += time.perf_counter() - began
            state = [values[v.id] for v in graph.state.outputs]
            actor = [values[v.id] for v in graph.actor.outputs]
            metrics.append([values[v.id] for _, v in graph.metrics])
            episodes.append([values[v.id] for v in graph.episodes])
        return state, actor, _sums(metrics), _sums(episodes)


def _timed(function: Callable[..., None], *arguments: Any) -> float:
    """Calls the function; returns the seconds it took."""
    began = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - began


def _sums(rows: list[list[Any]]) -> list[Any]:
    return [np.sum([np.asarray(x) for x in column], axis=0) for column in zip(*rows, strict=True)]
