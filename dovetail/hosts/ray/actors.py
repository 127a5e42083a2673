"""The Ray actor classes: a learner process, and a process for other workers."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from dovetail.errors import UserError
from dovetail.hosts.job import Job, prepare, refuse_other_versions
from dovetail.hosts.ray.connection import node_names
from dovetail.plan.ir import Plan
from dovetail.plan.processes import part_of

if TYPE_CHECKING:  # methods import what they need, so that a process starts its others first
    from dovetail.hosts.interface import Processes, Pulse
    from dovetail.hosts.serving import ProcessWorkers
    from dovetail.runtime.arrays import Leaf
    from dovetail.runtime.heartbeat import Activity
    from dovetail.runtime.local import LocalRuntime
    from dovetail.runtime.remote import Payload, Reply
    from dovetail.runtime.report import Report, Tapped
    from dovetail.runtime.wire import Sendable, SentValues
    from dovetail.telemetry.spans import Span

SET_UP_SECONDS = 300.0
"""How long a process may take to import and trace."""


@dataclass(frozen=True)
class PackedJob:
    """A pickled job, unpickled on the node, where errors can be reported with its name."""

    versions: Mapping[str, str]
    """The versions on the driver."""
    packed: bytes

    def job(self) -> Job:
        """Unpickles the job; raises `UserError` if this node lacks a package or version."""
        import ray.cloudpickle

        refuse_other_versions(self.versions, node_name())
        try:
            return ray.cloudpickle.loads(self.packed)  # pyright: ignore[reportPrivateImportUsage]
        except ImportError as error:
            raise UserError(
                f"Node {node_name()} cannot load the algorithm or the environment ({error}): "
                f"install what they import there, or put it into the folder of their files."
            ) from error


class WorkerProcess:
    """Hosts workers other than the learner, and the environments they step."""

    def __init__(self, order: PackedJob, rank: int, name: str) -> None:
        self._order, self._rank, self._name = order, rank, name
        self._workers: ProcessWorkers | None = None
        self._there = threading.Event()

    def set_up(self) -> str:
        """Traces the algorithm and builds the workers; returns the name of the node."""
        from dovetail.hosts.serving import ProcessWorkers

        job = self._order.job()
        process = next(s for s in job.plan.processes if s.name == self._name)
        prepare(job, process.gpus)
        graph, env = job.build(job.plan)
        plan = part_of(job.plan, self._rank)
        self._workers = ProcessWorkers(graph, plan, env, job.patience, process.workers)
        self._there.set()
        return node_name()

    def begin(self, worker: str, held: SentValues, keys: Sendable | None) -> SentValues:
        """See `ProcessWorkers`; waits for `set_up`."""
        if not self._there.wait(SET_UP_SECONDS):
            raise UserError(f"{worker} was not set up within {SET_UP_SECONDS:.0f} s.")
        return self._built().begin(worker, held, keys)

    def held(self, worker: str) -> SentValues:
        """See `ProcessWorkers`."""
        return self._built().held(worker)

    def run(
        self, worker: str, chain: int, shared: tuple[bool, ...], *payloads: SentValues
    ) -> Reply | tuple[Reply | Payload, ...]:
        """See `ProcessWorkers`; returns shared payloads after the reply, as separate objects."""
        from dovetail.hosts.interface import in_parts

        reply, parts = in_parts(self._built().run(worker, chain, payloads), shared)
        return (reply, *parts) if parts else reply

    def pulse(self, worker: str) -> Pulse:
        """See `ProcessWorkers`; Ray answers it in another thread while `run` runs."""
        from dovetail.hosts.interface import Pulse

        if not self._there.is_set():
            return Pulse(0.0, False, "It is being set up.")
        return self._built().pulse(worker)

    def close(self) -> None:
        """Closes the environments."""
        if self._workers is not None:
            self._workers.close()

    def _built(self) -> ProcessWorkers:
        assert self._workers is not None  # the first call is `begin`, which waits for `set_up`
        return self._workers


class ActorProcess(WorkerProcess):
    """Hosts acting workers; Ray displays the class name."""


class SideProcess(WorkerProcess):
    """Hosts a side that neither learns nor acts; Ray displays the class name."""


class LearnerPart(NamedTuple):
    """One learner process's part of a run."""

    job: Job
    plan: Plan
    """The plan of the workers that belong to this learner process."""
    processes: Processes
    """The processes of its other workers."""


@dataclass(frozen=True)
class LearnerReport:
    """The report of a learner process on some iterations, without the states after them."""

    metrics: Mapping[str, np.ndarray]
    episodes: list[np.ndarray]
    """As in `Report`, for the environments of this process."""
    measures: dict[str, float]
    finite: bool
    taps: list[Tapped]
    spans: dict[str, list[Span]]
    dropped_spans: int
    clock: tuple[float, float]
    """Start and end on the clock of the process, to which the spans refer."""
    seconds: dict[str, float]
    """Seconds spent so far, by fragment."""


class LearnerProcess:
    """Hosts a learner, or one process of it, and supervises its actors."""

    def __init__(self, order: PackedJob, rank: int) -> None:
        self._order, self._rank = order, rank
        # Bounded, in case the driver stops asking; appends and pops of a deque are atomic.
        self._news: deque[str] = deque(maxlen=1000)
        self._reports: dict[int, Report] = {}
        """By the number of iterations done; their states have not been requested yet."""
        self._done = 0
        self._part: LearnerPart | None = None
        self._runtime: LocalRuntime | None = None

    def set_up(self) -> str:
        """Starts the processes of its workers first of all; returns the name of its node."""
        from dovetail.hosts.interface import Processes
        from dovetail.hosts.ray.host import RayHost

        job = self._order.job()
        plan = part_of(job.plan, self._rank)
        others = [process for process in plan.processes if not process.learns]
        acting = [process.name for process in others if not process.keeps]
        min_actors = len(acting) if plan.min_actors is None else plan.min_actors
        processes = Processes(
            RayHost(plan, self._order),
            {process.name: process.workers for process in others},
            job.patience,
            self._news.append,
            acting[min_actors:],
            # Synchronous actors wait for each other.
            () if plan.ordered else acting,
        )
        self._part = LearnerPart(job, plan, processes)
        return node_name()

    def address(self, alone: bool) -> str:
        """An address for the `jax.distributed` coordinator; on loopback if there is one node."""
        host = "127.0.0.1" if alone else _node_address()
        # Bind to port 0 to find a free port; the coordinator binds it again right after.
        with socket.socket() as free:
            free.bind((host, 0))
            return f"{host}:{free.getsockname()[1]}"

    def build(self, coordinator: str | None) -> None:
        """Traces the algorithm and builds the runtime.

        With `coordinator`, joins the other learner processes first.
        """
        from dovetail.runtime.distributed import join_processes
        from dovetail.runtime.local import LocalRuntime

        assert self._part is not None  # the driver waits for `set_up`
        job, plan, processes = self._part
        process = plan.processes[0]
        prepare(job, process.gpus)
        if coordinator is not None:
            join_processes(coordinator, job.plan.ranks, self._rank)
        graph, env = job.build(job.plan)
        self._runtime = LocalRuntime(
            graph,
            plan,
            env,
            job.seeds,
            job.patience,
            self._news.append,
            processes,
            process.workers,
        )

    def load(
        self,
        state: list[Sendable],
        actor: list[Sendable],
        keys: Sendable,
        turn: int,
        watched: tuple[int, ...],
    ) -> tuple[list[Sendable], float]:
        """Sets the states at iteration `turn`; returns (actors' state, compile seconds)."""
        import jax

        from dovetail.runtime.distributed import own_part
        from dovetail.runtime.wire import pack, unpack

        runtime = self._built()
        whole = runtime.graph.state.tree.unflatten([unpack(leaf) for leaf in state])
        actors = runtime.graph.actor.tree.unflatten([unpack(leaf) for leaf in actor])
        episode_keys = jax.numpy.asarray(unpack(keys))
        begun = runtime.load(whole, actors, episode_keys=episode_keys, turn=turn, watched=watched)
        self._done = turn
        leaves = [pack(own_part(leaf)) for leaf in jax.tree.leaves(begun)]
        return leaves, runtime.compile_seconds

    def refill(self, data: list[Sendable]) -> None:
        """Replaces the recorded steps that iterations sample."""
        from dovetail.runtime.wire import unpack

        self._built().refill([unpack(leaf) for leaf in data])

    def advance(self, iterations: int, held: tuple[int, ...]) -> LearnerReport:
        """Runs that many iterations; returns their report without the states.

        The states stay here until requested. Earlier ones are dropped unless their number of
        iterations is in `held`.
        """
        from dovetail.runtime.distributed import own_part

        runtime, began = self._built(), time.perf_counter()
        report = runtime.advance(iterations).wait()
        self._done += iterations
        kept = {done: old for done, old in self._reports.items() if done in held}
        self._reports = {**kept, self._done: report}
        return LearnerReport(
            metrics={name: np.asarray(total) for name, total in report.metrics.items()},
            episodes=[np.asarray(own_part(x)) for x in report.episodes],
            measures=report.measures,
            finite=report.finite,
            taps=[t._replace(values=[np.asarray(x) for x in t.values]) for t in report.taps],
            spans={name: list(spans) for name, spans in report.spans.items()},
            dropped_spans=report.dropped_spans,
            clock=(began, time.perf_counter()),
            seconds=runtime.seconds,
        )

    def states(self, done: int, replay: bool) -> tuple[list[Sendable | None], list[Sendable]]:
        """The state after `done` iterations, and the state of this process's actors.

        Without `replay`, leaves of a replay may be None.
        """
        import jax

        from dovetail.runtime.distributed import own_part
        from dovetail.runtime.wire import pack

        if done not in self._reports:
            raise UserError(f"The state after update {done} is not kept any more.")
        report, graph = self._reports[done], self._built().graph
        # None takes the place of an array of a replay that was not asked for.
        leaves = graph.state.tree.flatten_up_to(report.state(replay=replay))
        found = cast("list[Leaf | None]", leaves)
        data = graph.data  # the driver has these
        state = [
            None if leaf is None or i in data else pack(own_part(leaf))
            for i, leaf in enumerate(found)
        ]
        return state, [pack(own_part(leaf)) for leaf in jax.tree.leaves(report.actor())]

    def status(self) -> list[Activity]:
        """The current activity of every worker, including those of actor processes."""
        return [] if self._runtime is None else self._runtime.status()

    def news(self) -> list[str]:
        """New messages for the user; an answer is also a sign of life."""
        found: list[str] = []
        while self._news:
            found.append(self._news.popleft())
        return found

    def close(self) -> None:
        """Stops the runtime, then the processes of its actors."""
        if self._runtime is not None:
            self._runtime.close()
        if self._part is not None:
            self._part.processes.close()

    def _built(self) -> LocalRuntime:
        assert self._runtime is not None  # the driver waits for `build`
        return self._runtime


def node_name() -> str:
    """The name of this process's node."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    return node_names(ray.nodes()).get(own, own)


def _node_address() -> str:
    import ray

    return ray.util.get_node_ip_address()
