"""Runs a plan that is one compiled program: an asynchronous dispatch runs many iterations."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import numpy as np

from dovetail.envs.resolve import Env
from dovetail.graph.ir import Graph
from dovetail.graph.unroll import ActorState
from dovetail.plan.ir import Plan
from dovetail.runtime.arrays import Leaf
from dovetail.runtime.devices import mesh_of, replicated
from dovetail.runtime.distributed import MeshLayout
from dovetail.runtime.heartbeat import Activity, Watch, Watchdog
from dovetail.runtime.iterations import Iterated, Parts, many_iterations, over_devices, over_seeds
from dovetail.runtime.report import Report, Tapped, all_finite, sums
from dovetail.telemetry.spans import COMPUTE, WAIT, Track


class FusedRun:
    """Dispatches the program of a fused plan."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        env: Env,
        seeds: int,
        patience: float,
        tell: Callable[[str], None],
    ) -> None:
        assert env.jax is not None or not graph.unrolls
        replicas = len(plan.workers[0].devices)
        split = (graph.home, *graph.acting, *graph.tables)  # every replica computes the others
        program = many_iterations(graph, env.jax, dict.fromkeys(split, replicas))
        if seeds > 1:
            program = over_seeds(program)
        self._layout = self._mesh = None
        if replicas > 1:
            found = jax.devices()
            devices = [found[i] for i in plan.workers[0].devices]
            held = enumerate(graph.state.inputs)
            sides = [value.side for i, value in held if i not in graph.data]
            program = over_devices(program, devices, [side in graph.tables for side in sides])
            self._mesh = mesh_of(devices)
            self._layout = MeshLayout(self._mesh) if jax.process_count() > 1 else None
        self._parts = Parts(graph)
        self._graph = graph
        self._program = jax.jit(program)
        self._call: Callable[..., Iterated] = self._program
        self._watch = Watch(plan.workers[0].name)
        self._watch.warm = True  # compiled ahead
        self._watchdog = Watchdog([self._watch], patience, tell)
        self._state: list[Leaf] = []
        self._data: list[Leaf] = []
        self._actor: list[Leaf] = []
        self._watched: Sequence[int] = ()
        self._track = Track(self._watch.worker)

    def ask_to_stop(self) -> None:
        """Does nothing: a compiled program ends by itself."""

    def compile(self, state: object, actor: ActorState) -> None:
        """Compiles for states of these shapes."""
        leaves = jax.tree.leaves(state), jax.tree.leaves(actor)
        if self._layout is not None:
            leaves = self._layout.shapes(*leaves)
        parts = self._parts.apart(leaves[0])
        self._call = self._program.lower(*parts, leaves[1], np.int32(1)).compile()

    def load(
        self,
        state: object,
        actor: ActorState,
        episode_keys: jax.Array,
        first_turn: int,
        watched: Sequence[int] = (),
    ) -> ActorState:
        """Sets the states of the next iteration; returns the actors' state unchanged."""
        self._state, self._actor = jax.tree.leaves(state), jax.tree.leaves(actor)
        if self._layout is not None:
            self._state, self._actor = self._layout.place(self._state, self._actor)
        self._state, data = self._parts.apart(self._state)
        self.refill(data)
        self._watched = watched
        return actor

    def refill(self, data: Sequence[Leaf]) -> None:
        """Replaces the recorded steps that iterations sample."""
        mesh = self._mesh
        self._data = list(data) if mesh is None else [replicated(leaf, mesh) for leaf in data]

    def warm_up(self) -> None:
        """Does nothing: `compile` has compiled everything."""

    def advance(self, iterations: int) -> "Dispatched":
        """Dispatches that many iterations: at once, or one by one if the graph has a tap."""
        # A dispatch returns the tapped values of its last iteration only.
        counts = [iterations] if self._graph.tap is None else [1] * iterations
        # JAX dispatches asynchronously: this returns before the iterations have run.
        rows = [self._dispatch(count) for count in counts]
        last = rows[-1]
        names = [name for name, _ in self._graph.metrics]
        state, actor = self._parts.whole(self._state, self._data), self._actor
        report = Report(
            iterations,
            dict(zip(names, last.metrics, strict=True)),
            last.episodes,
            lambda replay=True: self._graph.state.tree.unflatten(state),
            lambda: self._graph.actor.tree.unflatten(actor),
            taps=[Tapped(row.tapped) for row in rows] if self._graph.tap else (),
        )
        finite = partial(all_finite, state, self._watched)
        return Dispatched(report, self._watch, self._track, finite, rows)

    def _dispatch(self, count: int) -> Iterated:
        """Dispatches `count` iterations as one call."""
        # The count is a traced argument: one compilation serves any number.
        made = self._call(self._state, self._data, self._actor, np.int32(count))
        self._state, self._actor = made.state, made.actor
        return made._replace(state=[], actor=[])  # else each row would keep its states alive

    @property
    def seconds(self) -> dict[str, float]:
        """Empty: one program cannot be timed by fragment."""
        return {}

    def status(self) -> list[Activity]:
        """The current activity of the only worker."""
        return [self._watch.status()]

    def close(self) -> None:
        """Stops the watchdog; there is nothing else to close."""
        self._watchdog.close()


class Dispatched:
    """Dispatched iterations."""

    def __init__(
        self,
        report: Report,
        watch: Watch,
        track: Track,
        finite: Callable[[], bool],
        rows: Sequence[Iterated],
    ) -> None:
        """`rows` are the results of all dispatches, `report` describes the last one."""
        self._report, self._rows = report, rows
        self._watch = watch
        self._track = track
        self._finite = finite
        self._began = time.perf_counter()
        if track.paused is not None:
            track.add(WAIT, "leave to go on", track.paused, self._began - track.paused)

    def wait(self) -> Report:
        """Waits for the iterations and returns their report."""
        self._watch.doing(f"computing {self._report.iterations} iterations in one program")
        # The waiting thread counts as the worker: it is blocked while the device computes.
        self._watch.begin()
        jax.block_until_ready(self._report.metrics)
        self._watch.idle()
        # From here until the next dispatch the worker waits for the caller.
        self._track.paused = time.perf_counter()
        seconds, calls = self._track.paused - self._began, self._report.iterations
        self._track.add(COMPUTE, "iteration", self._began, seconds, calls)
        spans = {self._watch.worker: self._track.drain()}
        return replace(self._summed(), finite=self._finite(), spans=spans)

    def _summed(self) -> Report:
        """The report, summed over all dispatches."""
        if len(self._rows) == 1:
            return self._report
        metrics = sums([row.metrics for row in self._rows])
        return replace(
            self._report,
            metrics=dict(zip(self._report.metrics, metrics, strict=True)),
            episodes=sums([row.episodes for row in self._rows]),
        )
