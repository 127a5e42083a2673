"""The learner's side of its actors' processes: starts them, calls them, sees when one is gone."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dovetail.errors import UserError
from dovetail.plan.ir import Station
from dovetail.runtime.away import OutpostLost, Reply, Values
from dovetail.runtime.cluster.connection import node_names
from dovetail.runtime.cluster.job import Job
from dovetail.runtime.cluster.stations import ActorStation, Order, ReplayStation
from dovetail.runtime.exchange import Closed
from dovetail.runtime.watch import COMPILE_SECONDS
from dovetail.runtime.wire import pack, unpack

LOOK_SECONDS = 1.0
"""How often a call that is waited for is looked at."""
PLACE_SECONDS = 60.0
"""How long a process that the run cannot do without may wait for room on the cluster."""
CLOSE_SECONDS = 5.0
"""How long a process may take to end its environments."""


class RayAbroad:
    """The processes of the actors that work for one learner process."""

    def __init__(self, job: Job, order: Order, rank: int, tell: Callable[[str], None]) -> None:
        """Starts them at once: they come up while the learner does."""
        self._stopping = threading.Event()
        own = [s for s in job.plan.stations if s.rank == rank and not s.learns]
        acting = [station.name for station in own if not station.keeps]
        fewest = len(acting) if job.plan.fewest is None else job.plan.fewest
        self._processes = [
            _Process(job, order, station, self._stopping, station.name in acting[fewest:], tell)
            for station in own
        ]

    @staticmethod
    def share(values: Values) -> Any:
        """One object for all outposts, freed with the version."""
        return ray.put({number: pack(leaf) for number, leaf in values.items()})

    def outpost(self, worker: str) -> "RayOutpost":
        """The process of a worker."""
        process = next(p for p in self._processes if worker in p.station.workers)
        return RayOutpost(process, worker)

    def stop(self) -> None:
        """Nobody waits for an outpost any more."""
        self._stopping.set()

    def close(self) -> None:
        """Ends every process, all at a time."""
        self._stopping.set()
        closing = [process.ask_to_close() for process in self._processes]
        asked = [ref for ref in closing if ref is not None]
        with contextlib.suppress(RayError):
            ray.wait(asked, num_returns=len(asked), timeout=CLOSE_SECONDS) if asked else None
        for process in self._processes:
            process.kill(process.actor)


class _Process:
    """A station's process, started again when it is gone."""

    def __init__(
        self,
        job: Job,
        order: Order,
        station: Station,
        stopping: threading.Event,
        optional: bool,
        tell: Callable[[str], None],
    ) -> None:
        """`optional`: whether a run begins, and goes on, without it."""
        self.station = station
        self.stopping = stopping
        self.optional = optional
        self.patience = job.patience
        self._order, self._tell = order, tell
        self._lock = threading.Lock()
        self._where = "no node yet"
        self.actor: Any = None
        self._start(station.node)

    def _start(self, node: str) -> None:
        """Asks Ray for it; on the node of the plan if that can be."""
        station = self.station
        ids = {name: node for node, name in node_names(ray.nodes()).items()}
        strategy: Any = "SPREAD"
        if node in ids:
            strategy = NodeAffinitySchedulingStrategy(ids[node], soft=True)
        self.actor = (
            ray.remote(ReplayStation if station.keeps else ActorStation)
            .options(
                num_cpus=station.cpus,
                num_gpus=station.gpus,
                resources=dict(station.others) or None,
                max_concurrency=len(station.workers) + 2,  # setting up, and the pulse
                max_restarts=0,
                scheduling_strategy=strategy,
            )
            .remote(self._order, station.rank, station.name)
        )
        self._ready = self.actor.set_up.remote()

    def started(self) -> tuple[Any, Any]:
        """(the process, what it answers once it is set up); started anew if it was gone."""
        with self._lock:
            if self.actor is None:
                self._start("")
            return self.actor, self._ready

    def wait_until_there(self, actor: Any, ready: Any) -> None:
        """Waits until it has a place on the cluster and answers."""
        began, told = time.monotonic(), False
        while not ray.wait([ready], timeout=LOOK_SECONDS)[0]:
            if self.stopping.is_set():
                raise Closed("stopping")
            waited = time.monotonic() - began
            if waited > PLACE_SECONDS and not self.optional:
                raise UserError(self._no_room(waited))
            if waited > self.patience and not told:
                told = True
                self._tell(self._no_room(waited))
        self._where = self._get(actor, ready)

    def _no_room(self, waited: float) -> str:
        station = self.station
        free = ray.available_resources()
        return (
            f"{station.name} has waited {waited:.0f} s for {station.cpus:g} CPUs and "
            f"{station.gpus:g} GPUs; free on the whole cluster are {free.get('CPU', 0):g} and "
            f"{free.get('GPU', 0):g}."
        )

    def wait(self, actor: Any, called: Any, worker: str, beat: Callable[[], None]) -> Any:
        """Waits for a call, and looks after the process meanwhile."""
        last = time.monotonic()
        while True:
            try:
                return self._get(actor, called, LOOK_SECONDS)
            except GetTimeoutError:
                pass
            if self.stopping.is_set():
                raise Closed("stopping")
            last = self._look(actor, worker, last, beat)

    def _look(self, actor: Any, worker: str, last: float, beat: Callable[[], None]) -> float:
        """Whether a worker gets on; one that does not is ended. Returns when it last did."""
        try:
            quiet, warm, complaint = ray.get(actor.pulse.remote(worker), timeout=LOOK_SECONDS)
        except GetTimeoutError:
            quiet, warm, complaint = time.monotonic() - last, False, "It does not answer."
        except RayError:
            return last  # the call itself tells
        limit = self.patience if warm else max(self.patience, COMPILE_SECONDS)
        if quiet > limit:
            self.kill(actor)
            raise OutpostLost(
                f"{self.station.name} on {self._where} hangs, and is ended: {complaint}"
            )
        if quiet < 2 * LOOK_SECONDS:
            beat()
        return time.monotonic() - min(quiet, time.monotonic() - last)

    def _get(self, actor: Any, reference: Any, limit: float | None = None) -> Any:
        """What a call returned or raised, as if it had been made here."""
        try:
            return ray.get(reference, timeout=limit)
        except RayTaskError as error:
            raise _cause(error) from error
        except RayActorError as error:
            self.kill(actor)
            raise OutpostLost(
                f"{self.station.name} on {self._where} is gone ({_reason(error)})."
            ) from error

    def ask_to_close(self) -> Any:
        """Has it end its environments."""
        return None if self.actor is None else self.actor.close.remote()

    def kill(self, actor: Any) -> None:
        """Ends it; one that has taken its place meanwhile is left alone."""
        with self._lock:
            if self.actor is actor:
                self.actor = None
        if actor is not None:
            with contextlib.suppress(Exception):
                ray.kill(actor)


class RayOutpost:
    """A worker in such a process."""

    def __init__(self, process: _Process, worker: str) -> None:
        self._process, self._worker = process, worker
        self._actor: Any = None

    def begin(self, leaves: list[Any], keys: Any) -> Callable[[], list[Any]]:
        """Sets the actor's state, once the process is there."""
        process, worker = self._process, self._worker
        actor, ready = process.started()
        called = actor.begin.remote(worker, [pack(leaf) for leaf in leaves], pack(keys))

        def begun() -> list[Any]:
            process.wait_until_there(actor, ready)
            made = process.wait(actor, called, worker, lambda: None)
            self._actor = actor
            return [unpack(leaf) for leaf in made]

        return begun

    def hold(self, leaves: list[Any]) -> None:
        """Gives it its part of the replay, once the process is there."""
        process, worker = self._process, self._worker
        actor, ready = process.started()
        called = actor.hold.remote(worker, [pack(leaf) for leaf in leaves])
        process.wait_until_there(actor, ready)
        process.wait(actor, called, worker, lambda: None)
        self._actor = actor

    def held(self) -> list[Any]:
        """Its part of the replay as it is by now."""
        process, actor = self._process, self._there()
        made = process.wait(actor, actor.held.remote(self._worker), self._worker, lambda: None)
        return [unpack(leaf) for leaf in made]

    def _there(self) -> Any:
        process, actor = self._process, self._actor
        if actor is None or process.actor is not actor:
            raise OutpostLost(f"{process.station.name}, the process of {self._worker}, is gone.")
        return actor

    def run(self, stretch: int, given: Sequence[Any], beat: Callable[[], None]) -> Reply:
        """One call; what was shared goes as it is."""
        process, actor = self._process, self._there()
        called = actor.run.remote(self._worker, stretch, *given)
        reply = process.wait(actor, called, self._worker, beat)
        values = {number: unpack(leaf) for number, leaf in reply.values.items()}
        return replace(reply, values=values)


def _cause(error: RayTaskError) -> BaseException:
    cause = error.cause
    return cause if isinstance(cause, BaseException) else UserError(str(error))


def _reason(error: RayActorError) -> str:
    """Why, in a few words."""
    text = str(error)
    if "worker process has died" not in text and "node" in text:
        return "its node died"
    if "SYSTEM_ERROR" in text:
        return "its process was killed"
    return text.strip().splitlines()[0]
