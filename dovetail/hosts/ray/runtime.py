"""The driver's `Runtime` of a run on a cluster, with the interface of the local one."""

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakSet

import jax
import jax.numpy as jnp
import numpy as np
import ray
import ray.cloudpickle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dovetail.errors import UserError
from dovetail.graph.ir import Graph
from dovetail.graph.unroll import ActorState
from dovetail.hosts.job import Job, versions
from dovetail.hosts.ray.actors import LearnerProcess, LearnerReport, PackedJob
from dovetail.hosts.ray.connection import RayConnection, node_names
from dovetail.plan.ir import Plan, Process
from dovetail.runtime.arrays import Leaf
from dovetail.runtime.heartbeat import Activity
from dovetail.runtime.report import Report
from dovetail.runtime.supervision import StopRequest, refuse_overdue
from dovetail.runtime.wire import Sendable, pack, unpack
from dovetail.telemetry.spans import Span, clock_ahead, on_clock

T = TypeVar("T")

PLACE_SECONDS = 60.0
"""How long the learners may wait for resources on the cluster."""
BUILD_SECONDS = 300.0
"""How long a process may take to import, trace and compile."""
LOOK_SECONDS = 1.0
"""How often to check on the learners while waiting for them."""
CLOSE_SECONDS = 20.0
"""How long the processes may take to close."""


class ClusterRuntime:
    """Runs the processes of a plan. Close it to stop them."""

    def __init__(
        self, graph: Graph, job: Job, connection: RayConnection, tell: Callable[[str], None]
    ) -> None:
        self.graph = graph
        self.plan: Plan = job.plan
        self.compile_seconds = 0.0
        self.seconds: dict[str, float] = {}
        self._order = PackedJob(versions(), _packed(job))
        self._connection, self._tell = connection, tell
        self._done = 0
        self._held: WeakSet[_States] = WeakSet()
        """States that may still be requested, so the processes must keep them."""
        self._patience, self._answered, self._told = job.patience, time.monotonic(), False
        self._stop = StopRequest()
        self._loaded = False
        self._group: PlacementGroup | None = None
        self._ranks: list[Any] = []
        """The Ray actors; Ray makes their methods at run time, so they have no types."""
        self.where: list[str] = []
        """The node of every learner process."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """Reserves the resources of all learners together and starts them."""
        processes = [process for process in self.plan.processes if process.learns]
        ids = {name: node for node, name in node_names(ray.nodes()).items()}
        pinned = [{"ray.io/node-id": ids[s.node]} for s in processes if s.node in ids]
        bundles = [_bundle(s) for s in processes]
        # All learners or none: with only some of them, those would wait for the others forever.
        self._group = (
            placement_group(bundles, "SPREAD", bundle_label_selector=pinned)
            if pinned
            else placement_group(bundles, "SPREAD")
        )
        if not self._group.wait(PLACE_SECONDS):
            free = ray.available_resources()
            raise UserError(
                f"The learners have waited {PLACE_SECONDS:.0f} s for "
                f"{sum(s.cpus for s in processes):g} CPUs; the cluster has "
                f"{free.get('CPU', 0):g} free: end what else runs there."
            )
        for i, process in enumerate(processes):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=i)
            self._ranks.append(
                ray.remote(LearnerProcess)
                .options(
                    num_cpus=process.cpus,
                    num_gpus=process.gpus,
                    resources=dict(process.others) or None,
                    max_concurrency=4,  # `status` and `news` answer while it trains
                    max_restarts=0,
                    scheduling_strategy=strategy,
                )
                .remote(self._order, process.rank)
            )
        self.where = self._all([rank.set_up.remote() for rank in self._ranks], BUILD_SECONDS)
        coordinator = None
        if len(self._ranks) > 1:
            # On one node the coordinator need not listen on the network.
            alone = len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}) == 1
            [coordinator] = self._all([self._ranks[0].address.remote(alone)], BUILD_SECONDS)
        self._building = [rank.build.remote(coordinator) for rank in self._ranks]

    def prepare(self, state: object, actor: ActorState) -> None:
        """Does nothing: the learner processes compile."""

    def load(
        self,
        state: object,
        actor: ActorState,
        *,
        episode_keys: jax.Array | None = None,
        turn: int = 0,
        watched: Sequence[int] = (),
    ) -> ActorState:
        """Sets the states at iteration `turn`; returns the actors' state."""
        self._all(self._building, BUILD_SECONDS)
        keys = actor.keys if episode_keys is None else episode_keys
        # One object in the store for all learner processes.
        shared = ray.put([pack(leaf) for leaf in jax.tree.leaves(state)])
        size = self.plan.num_envs // len(self._ranks)
        calls: list[ray.ObjectRef[tuple[list[Sendable], float]]] = []
        for rank, process in enumerate(self._ranks):
            part = slice(rank * size, (rank + 1) * size)
            own = actor, keys
            if len(self._ranks) > 1:
                own = jax.tree.map(lambda leaf, part=part: leaf[part], own)
            leaves = [pack(leaf) for leaf in jax.tree.leaves(own[0])]
            arguments = (shared, leaves, pack(own[1]), turn, tuple(watched))
            calls.append(process.load.remote(*arguments))
        loaded = self._all(calls, BUILD_SECONDS)
        self._done, self._loaded = turn, True
        self.compile_seconds = max(seconds for _, seconds in loaded)
        return self._actors([leaves for leaves, _ in loaded])

    def ask_to_stop(self) -> None:
        """Waits for the learners no longer than the updates in flight may take."""
        self._stop.ask()

    def refill(self, data: Sequence[Leaf]) -> None:
        """Replaces the recorded steps that iterations sample; no iteration may be running."""
        shared = ray.put([pack(leaf) for leaf in data])
        self._all([rank.refill.remote(shared) for rank in self._ranks], BUILD_SECONDS)

    def advance(self, iterations: int) -> "PendingCall":
        """Starts that many iterations in every learner process."""
        # Weak references: a state that no report refers to any more may be dropped there.
        held = tuple(states.done for states in self._held)
        self._done += iterations
        states = _States(self, self._done)
        self._held.add(states)
        calls = [rank.advance.remote(iterations, held) for rank in self._ranks]
        return PendingCall(self, calls, iterations, states)

    def collect(self, calls: "list[ray.ObjectRef[LearnerReport]]") -> list[LearnerReport]:
        """Waits for the results of the learners and checks on them meanwhile."""
        return self._all(calls, None)

    def states(self, done: int, replay: bool = True) -> tuple[object, ActorState]:
        """The state and the actors' state after `done` iterations.

        Without `replay`, leaves of a replay may be None.
        """
        calls = [rank.states.remote(done, replay) for rank in self._ranks]
        found = self._all(calls, BUILD_SECONDS)
        leaves = [None if leaf is None else _array(leaf) for leaf in found[0][0]]
        state = self.graph.state.tree.unflatten(leaves)
        return state, self._actors([actor for _, actor in found])

    def _actors(self, parts: list[list[Sendable]]) -> ActorState:
        """Joins the actors' state of all learner processes."""
        columns = zip(*parts, strict=True)
        leaves = [
            _array(column[0]) if len(column) == 1 else jnp.concatenate([_array(x) for x in column])
            for column in columns
        ]
        return self.graph.actor.tree.unflatten(leaves)

    def _all(self, calls: "list[ray.ObjectRef[T]]", limit: float | None) -> list[T]:
        """Waits for calls; passes on messages of the processes and raises the first failure."""
        began = time.monotonic()
        waiting = list(calls)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=LOOK_SECONDS)
            for call in done:
                self._value(call)  # raise at once: the other learners wait for the failed one
            if waiting:
                self.tell_news()
            if waiting and limit is None:
                refuse_overdue(self._stop)
            if waiting and limit is not None and time.monotonic() - began > limit:
                raise UserError(
                    f"A learner has not answered for {limit:.0f} s: look at the cluster's nodes "
                    f"({', '.join(self.where)})."
                )
        return [self._value(call) for call in calls]

    def _value(self, call: "ray.ObjectRef[T]") -> T:
        """The result of a call; raises its failure as a `UserError`."""
        try:
            return ray.get(call)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, UserError):
                raise cause from error
            told = str(cause).strip() or type(cause).__name__
            raise UserError(f"A learner failed: {type(cause).__name__}: {told}") from error
        except RayActorError as error:
            self._connection.refuse_dead_head()  # a more specific error, if that is the cause
            where = ", ".join(dict.fromkeys(self.where)) or "the cluster"
            raise UserError(f"The learner on {where} is gone: its process or its node died.") from (
                error
            )

    def status(self) -> list[Activity]:
        """The current activity of every worker, and learners that do not answer."""
        found: list[Activity] = []
        for rank, process in enumerate(list(self._ranks)):
            try:
                found += ray.get(process.status.remote(), timeout=LOOK_SECONDS)
            except (GetTimeoutError, RayError):
                awaited = f"an answer of learner process {rank}"
                found.append(
                    {"name": "driver", "doing": "", "waits_for": awaited, "quiet_s": LOOK_SECONDS}
                )
        return found

    def tell_news(self) -> None:
        """Passes on messages of the processes; raises if the head node is gone."""
        self._connection.refuse_dead_head()
        answered = time.monotonic()
        for rank in self._ranks:
            try:
                for line in ray.get(rank.news.remote(), timeout=LOOK_SECONDS):
                    self._tell(line)
            except GetTimeoutError:
                answered = self._answered
            except RayError:
                continue  # the pending call raises it
        self._answered = answered
        silent = time.monotonic() - answered
        # Until it has compiled, a learner may be too busy to answer.
        if silent > (self._patience if self._loaded else BUILD_SECONDS):
            raise UserError(
                f"A learner on {', '.join(self.where)} has not answered for {silent:.0f} s: look "
                f"at its node, and resume the run."
            )
        if silent > self._patience and not self._told:
            self._tell(f"A learner on {', '.join(self.where)} does not answer.")
        self._told = silent > self._patience

    def close(self) -> None:
        """Stops every process; safe to call twice. Without a head node they exit on their own."""
        ranks, self._ranks = self._ranks, []
        if self._connection.lost:
            return
        closing = [rank.close.remote() for rank in ranks]
        with contextlib.suppress(RayError):
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        for rank in ranks:
            with contextlib.suppress(Exception):
                ray.kill(rank)
        if self._group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(self._group)
            self._group = None
        self._connection.close()


class PendingCall:
    """Iterations in progress on the learners."""

    def __init__(
        self,
        runtime: ClusterRuntime,
        calls: "list[ray.ObjectRef[LearnerReport]]",
        iterations: int,
        states: "_States",
    ) -> None:
        self._runtime, self._calls, self._iterations = runtime, calls, iterations
        self._called = time.perf_counter()
        self._states = states

    def wait(self) -> Report:
        """Waits for the iterations and returns their report."""
        found = self._runtime.collect(self._calls)
        answered = time.perf_counter()
        self._runtime.tell_news()
        first = found[0]
        self._runtime.seconds = first.seconds
        columns = zip(*[report.episodes for report in found], strict=True)
        episodes = [np.concatenate(column) for column in columns]
        return Report(
            self._iterations,
            first.metrics,
            episodes,
            self._states.state,
            self._states.actor,
            first.measures,
            self._spans(found, answered),
            sum(report.dropped_spans for report in found),
            all(report.finite for report in found),
            first.taps,
        )

    def _spans(self, found: list[LearnerReport], answered: float) -> dict[str, list[Span]]:
        """The spans of every learner process, converted to the driver's clock."""
        spans: dict[str, list[Span]] = {}
        for rank, report in enumerate(found):
            ahead = clock_ahead(self._called, answered, *report.clock)
            for name, own in report.spans.items():
                known = name if len(found) == 1 else f"{name} of {rank}"
                spans[known] = on_clock(own, ahead)
        return spans


class _States:
    """The states after `done` iterations, fetched once on demand.

    The learner processes keep the states while this object is alive.
    """

    def __init__(self, runtime: ClusterRuntime, done: int) -> None:
        self._runtime, self.done = runtime, done

    def state(self, replay: bool = True) -> object:
        """The state; without `replay`, leaves of a replay may be None."""
        return self._both[0] if replay else self._learners

    def actor(self) -> ActorState:
        """The actors' state."""
        return self._both[1]

    @cached_property
    def _learners(self) -> object:
        """The state without the leaves of a replay."""
        return self._runtime.states(self.done, replay=False)[0]

    @cached_property
    def _both(self) -> tuple[object, ActorState]:
        """(state, actors' state)."""
        return self._runtime.states(self.done)


def _packed(job: Job) -> bytes:
    try:
        return ray.cloudpickle.dumps(job)  # pyright: ignore[reportPrivateImportUsage]
    except Exception as error:
        raise UserError(
            f"The algorithm, the environment or the strategy cannot be sent to other processes "
            f"({error}): give classes and functions of a file, not objects made from them."
        ) from error


def _bundle(process: Process) -> dict[str, float]:
    return {"CPU": process.cpus, "GPU": process.gpus, **dict(process.others)}


def _array(leaf: Sendable) -> jax.Array:
    found = unpack(leaf)
    return jnp.asarray(found) if isinstance(found, np.ndarray) else found
