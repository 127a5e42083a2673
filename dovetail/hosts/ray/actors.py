"""The kinds of Ray actors: a learner's process, and one of any other workers."""

import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.errors import UserError
from dovetail.hosts.job import Job, prepare, refuse_other_versions
from dovetail.hosts.ray.connection import node_names
from dovetail.plan.processes import part_of

SET_UP_SECONDS = 300.0
"""How long a process may take to import and trace."""


@dataclass(frozen=True)
class PackedJob:
    """A job on its way: opened where it can be said what is wrong with it."""

    versions: Mapping[str, str]
    """The driver's."""
    packed: bytes

    def job(self) -> Job:
        """The job, if this node has what it needs."""
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
    """Hosts workers that are not the learner's, and the environments they step."""

    def __init__(self, order: "PackedJob", rank: int, name: str) -> None:
        self._order, self._rank, self._name = order, rank, name
        self._workers: Any = None
        self._there = threading.Event()

    def set_up(self) -> str:
        """Traces, and makes the workers; returns the node it is on."""
        from dovetail.hosts.serving import ProcessWorkers

        job = self._order.job()
        process = next(s for s in job.plan.processes if s.name == self._name)
        prepare(job, process.gpus)
        graph, env = job.build(job.plan)
        plan = part_of(job.plan, self._rank)
        self._workers = ProcessWorkers(graph, plan, env, job.patience, process.workers)
        self._there.set()
        return node_name()

    def begin(self, worker: str, held: dict[int, Any], keys: Any) -> dict[int, Any]:
        """See `ProcessWorkers`; may be asked before all is set up."""
        if not self._there.wait(SET_UP_SECONDS):
            raise UserError(f"{worker} was not set up within {SET_UP_SECONDS:.0f} s.")
        return self._workers.begin(worker, held, keys)

    def held(self, worker: str) -> dict[int, Any]:
        """See `ProcessWorkers`."""
        return self._workers.held(worker)

    def run(self, worker: str, chain: int, shared: tuple[bool, ...], *payloads: Any) -> Any:
        """See `ProcessWorkers`; what is shared is returned after the reply."""
        from dovetail.hosts.interface import in_parts

        reply, parts = in_parts(self._workers.run(worker, chain, payloads), shared)
        return (reply, *parts) if parts else reply

    def pulse(self, worker: str) -> tuple[float, bool, str]:
        """See `ProcessWorkers`."""
        if not self._there.is_set():
            return 0.0, False, "It is being set up."
        return self._workers.pulse(worker)

    def close(self) -> None:
        """Ends the environments."""
        if self._workers is not None:
            self._workers.close()


class ActorProcess(WorkerProcess):
    """Hosts workers that act; Ray shows its process by this name."""


class SideProcess(WorkerProcess):
    """Hosts a side that serves the others; Ray shows its process by this name."""


class LearnerProcess:
    """Hosts a learner, or one process of it, and sees to its actors."""

    def __init__(self, order: "PackedJob", rank: int) -> None:
        self._order, self._rank = order, rank
        self._news: deque[str] = deque(maxlen=1000)
        self._reports: dict[int, Any] = {}
        self._done = 0
        self._job: Any = None
        self._plan: Any = None
        self._processes: Any = None
        self._runtime: Any = None

    def set_up(self) -> str:
        """Has its workers' processes started, before anything of its own; returns its node."""
        from dovetail.hosts.interface import Processes
        from dovetail.hosts.ray.host import RayHost

        self._job = self._order.job()
        self._plan = plan = part_of(self._job.plan, self._rank)
        others = [process for process in plan.processes if not process.learns]
        acting = [process.name for process in others if not process.keeps]
        min_actors = len(acting) if plan.min_actors is None else plan.min_actors
        self._processes = Processes(
            RayHost(plan, self._order),
            {process.name: process.workers for process in others},
            self._job.patience,
            self._news.append,
            acting[min_actors:],
        )
        return node_name()

    def address(self, alone: bool) -> str:
        """Where this process would have the others meet: on this machine only, if that is all."""
        host = "127.0.0.1" if alone else _node_address()
        with socket.socket() as free:
            free.bind((host, 0))
            return f"{host}:{free.getsockname()[1]}"

    def build(self, coordinator: str | None) -> None:
        """Traces, and starts to compile; with `coordinator`, as one of several processes."""
        from dovetail.runtime.distributed import join_processes
        from dovetail.runtime.local import LocalRuntime

        job, plan = self._job, self._plan
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
            self._processes,
            process.workers,
        )

    def load(
        self, state: list[Any], actor: list[Any], keys: Any, turn: int, watched: tuple[int, ...]
    ) -> Any:
        """Sets what iteration number `turn` starts from; returns (actors' state, seconds that
        compiling took)."""
        import jax

        from dovetail.runtime.distributed import own_part
        from dovetail.runtime.wire import pack, unpack

        graph = self._runtime.graph
        whole = graph.state.tree.unflatten([unpack(leaf) for leaf in state])
        actors = graph.actor.tree.unflatten([unpack(leaf) for leaf in actor])
        begun = self._runtime.load(
            whole, actors, episode_keys=unpack(keys), turn=turn, watched=watched
        )
        self._done = turn
        leaves = [pack(own_part(leaf)) for leaf in jax.tree.leaves(begun)]
        return leaves, self._runtime.compile_seconds

    def refill(self, data: list[Any]) -> None:
        """Sets the recorded steps that the next iterations draw from."""
        from dovetail.runtime.wire import unpack

        self._runtime.refill([unpack(leaf) for leaf in data])

    def advance(self, iterations: int, held: tuple[int, ...]) -> dict[str, Any]:
        """Does that many iterations; returns what is to be known of them but the states, which
        are kept, as those after the iterations `held`, until a call without their number."""
        from dovetail.runtime.distributed import own_part

        began = time.perf_counter()
        report = self._runtime.advance(iterations).wait()
        self._done += iterations
        kept = {done: old for done, old in self._reports.items() if done in held}
        self._reports = {**kept, self._done: report}
        return {
            "metrics": {name: np.asarray(total) for name, total in report.metrics.items()},
            "episodes": [np.asarray(own_part(x)) for x in report.episodes],
            "measures": report.measures,
            "finite": report.finite,
            "taps": [([np.asarray(x) for x in t.values], list(t.parts)) for t in report.taps],
            "spans": {name: list(spans) for name, spans in report.spans.items()},
            "dropped_spans": report.dropped_spans,
            "clock": (began, time.perf_counter()),
            "seconds": self._runtime.seconds,
        }

    def states(self, done: int, replay: bool) -> tuple[list[Any], list[Any]]:
        """The learner's state after `done` iterations, and that of this process's actors; without
        `replay`, None for what is held there."""
        import jax

        from dovetail.runtime.distributed import own_part
        from dovetail.runtime.wire import pack

        if done not in self._reports:
            raise UserError(f"The state after update {done} is not kept any more.")
        report = self._reports[done]
        leaves = report.state(replay=replay)
        tree: Any = self._runtime.graph.state.tree
        found = tree.flatten_up_to(leaves)
        data = self._runtime.graph.data  # the driver has these
        state = [
            None if leaf is None or i in data else pack(own_part(leaf))
            for i, leaf in enumerate(found)
        ]
        return state, [pack(own_part(leaf)) for leaf in jax.tree.leaves(report.actor())]

    def status(self) -> list[dict[str, Any]]:
        """What every worker is at, those of its actors' processes included."""
        return [] if self._runtime is None else self._runtime.status()

    def news(self) -> list[str]:
        """What people should know of that happened since; an answer is a sign of life."""
        found: list[str] = []
        while self._news:
            found.append(self._news.popleft())
        return found

    def close(self) -> None:
        """Ends its actors, then itself."""
        if self._runtime is not None:
            self._runtime.close()
        if self._processes is not None:
            self._processes.close()


def node_name() -> str:
    """The node that this process is on, as its owner calls it."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    return node_names(ray.nodes()).get(own, own)


def _node_address() -> str:
    import ray

    return ray.util.get_node_ip_address()
