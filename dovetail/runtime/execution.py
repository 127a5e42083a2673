"""Runs and supervises the workers of a plan.

If one worker does everything but stepping, it runs in the caller's thread. Otherwise each worker
has its own thread, and the caller that waits for a report gets the error of a failed worker.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial

import jax
import numpy as np

from dovetail.envs.resolve import Env
from dovetail.errors import one_sentence
from dovetail.graph.ir import Graph, Value
from dovetail.graph.unroll import ActorState
from dovetail.plan.ir import Plan
from dovetail.runtime.arrays import Leaf, Values, leaves_of
from dovetail.runtime.channel import Closed, Message, Turn
from dovetail.runtime.environments import HostStepper, ThreadPort
from dovetail.runtime.heartbeat import Activity, Watchdog
from dovetail.runtime.interruption import Interruption
from dovetail.runtime.measures import measures_of, seconds_of
from dovetail.runtime.records import LOOK_SECONDS, Records, UpdateRecord
from dovetail.runtime.remote import RemoteWorkers
from dovetail.runtime.report import Report, Tapped, UpdatePart, all_finite, sums
from dovetail.runtime.schedule import Workers
from dovetail.runtime.states import States
from dovetail.runtime.supervision import (
    Recovery,
    StopRequest,
    WorkerFailed,
    end_hang,
    refuse_hung,
    refuse_overdue,
)
from dovetail.runtime.worker import RunningWorker
from dovetail.telemetry.spans import COMPUTE, WAIT

JOIN_SECONDS = 5.0
"""Time limit for joining the workers' threads at the end."""
STEPPING = (HostStepper.step, HostStepper.reset, ThreadPort.receive)
"""The functions in which a worker in the caller's thread may be interrupted."""


class Execution:
    """The workers of a plan in threads, or a single one in the caller's thread."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        env: Env,
        patience: float,
        tell: Callable[[str], None],
        host: RemoteWorkers | None = None,
        here: Collection[str] | None = None,
    ) -> None:
        self._graph, self._plan = graph, plan
        self._patience, self._tell = patience, tell
        self._host = host
        self._stopping = threading.Event()
        self._stop = StopRequest()
        self._workers = Workers(graph, plan, env, patience, host, here)
        self._states = States(graph, plan, env, self._workers, self._stop)
        set_up = self._states.set_up
        self._recovery = Recovery(graph, plan, set_up, self._stopping, self._stop, tell)
        self._records = Records()
        self._limit = self._done = 0
        self._ends: set[int] = set()
        """The updates after which the states are needed."""
        self._lost = 0
        """Number of unrolls begun in another process that never arrived."""
        self._may_go_on = threading.Condition()
        self._failure: tuple[str, BaseException] | None = None
        self._broken = False
        """Whether a worker has failed beyond recovery."""
        self._threads: list[threading.Thread] = []
        self._staleness: deque[int] = deque(maxlen=10_000)
        self._watched: Sequence[int] = ()
        self._coming: dict[str, Callable[[], None]] = {}
        watches = [worker.watch for worker in self._workers.all]
        self._interruption = Interruption(*STEPPING)
        self._watchdog = Watchdog(watches, patience, tell, self._end_hang)

    def ask_to_stop(self) -> None:
        """Ends what hangs and restarts nothing from now on; a signal handler may call it."""
        self._stop.ask()
        if self._host is not None:
            self._host.hurry()

    def _end_hang(self) -> None:
        if self._workers.is_one:
            [worker] = self._workers.all
            end_hang(self._interruption, worker.watch, self._patience, self._stop)

    def compile(self, state: object, actor: ActorState) -> None:
        """Compiles every fragment for the shapes in the graph."""
        self._workers.programs.compile()

    def load(
        self,
        state: object,
        actor: ActorState,
        episode_keys: jax.Array,
        first_turn: int,
        watched: Sequence[int] = (),
    ) -> ActorState:
        """Sets the states at turn `first_turn` and begins an episode in every host environment.

        Returns the actors' state with the first observations.
        """
        self._workers.channels.begin_at(first_turn)
        self._limit = self._done = first_turn
        self._watched = watched
        self._states.split(actor, episode_keys)
        for worker in self._workers.all:
            worker.begin_at(first_turn)
            self._states.give(worker, state)
            if self._states.acts(worker) is not None and worker.away is None:
                self._recovery.begin(worker)
        self._reach_away()
        return self._states.actor(self._states.copies)

    def refill(self, data: Sequence[Leaf]) -> None:
        """Replaces the recorded steps that iterations sample."""
        self._states.refill(data)

    def _reach_away(self) -> None:
        """Sets up the workers in other processes in parallel and waits for them.

        Actors beyond `min_actors` are optional at the start: their own threads wait for them.
        """
        away = [worker for worker in self._workers.all if worker.away is not None]
        coming = {worker.name: self._states.set_up(worker, 0) for worker in away}
        acting = [worker for worker in away if self._states.acts(worker) is not None]
        min_actors = len(acting) if self._plan.min_actors is None else self._plan.min_actors
        for worker in away:
            if worker not in acting[min_actors:]:
                self._recovery.wait_for(worker, coming.pop(worker.name))
        self._coming = coming

    def warm_up(self) -> None:
        """Compiles the acting programs whose inputs exist before the first iteration."""
        state = self._workers.home.held
        for program, worker in self._workers.programs.acting:
            values = {**state, **worker.held}
            if program.can_warm_up(values):
                program.warm_up(values)

    def advance(self, iterations: int) -> "PendingUpdates":
        """Lets the workers run that many more updates.

        Called in the caller's thread; with several workers it returns at once.
        """
        self._ends.add(self._limit + iterations)
        if self._workers.is_one:
            # It runs right here: the updates are done when this returns.
            [worker] = self._workers.all
            worker.watch.begin()
            if worker.track.paused is not None:
                spent = time.perf_counter() - worker.track.paused
                worker.track.add(WAIT, "leave to go on", worker.track.paused, spent)
            for number in range(self._done, self._done + iterations):
                self._turn(worker, number)
            worker.track.paused = time.perf_counter()
            self._done = self._limit = self._done + iterations
            return PendingUpdates(self, iterations)
        with self._may_go_on:
            self._limit += iterations
            self._workers.home.watch.beat()  # until now it waited for the caller
            self._may_go_on.notify_all()
        if not self._threads:
            self._start()
        return PendingUpdates(self, iterations)

    def _start(self) -> None:
        for worker in self._workers.all:
            thread = threading.Thread(
                target=self._work, args=(worker,), name=f"dovetail-{worker.name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _work(self, worker: RunningWorker) -> None:
        """The body of a worker's thread."""
        worker.watch.begin()
        # All workers count turns from the same number, or channels in lockstep would never match.
        number = self._done
        try:
            self._wait_to_join(worker)
            while not self._stopping.is_set():
                if worker is self._workers.home:
                    self._wait_for_leave(worker, number)
                self._turn(worker, number)
                number += 1
        except Closed:
            pass
        except BaseException as error:
            # The first failure is the cause; those of other workers follow from it.
            if self._failure is None and not self._stopping.is_set():
                self._failure = worker.name, error
            self._broken = True
            self._workers.channels.close()  # else the others would wait for this worker forever

    def _wait_to_join(self, worker: RunningWorker) -> None:
        """Waits for the process of a worker that may join late."""
        coming = self._coming.get(worker.name)
        if coming is None:
            return
        worker.watch.idle("room on the cluster")
        self._recovery.wait_for(worker, coming)
        self._tell(f"{worker.name} has joined.")

    def _wait_for_leave(self, worker: RunningWorker, number: int) -> None:
        """Blocks the home worker until the caller asks for update `number`.

        Raises `Closed` if the run ends meanwhile.
        """
        worker.watch.idle("leave to go on")
        began, waited = time.perf_counter(), False
        with self._may_go_on:
            while number >= self._limit and not self._stopping.is_set():
                waited = True
                self._may_go_on.wait()
        if waited:
            worker.track.add(WAIT, "leave to go on", began, time.perf_counter() - began)
        if self._stopping.is_set():
            raise Closed("stopping")

    def _turn(self, worker: RunningWorker, number: int) -> None:
        """Runs one turn of a worker, again after each recovery."""
        while True:
            try:
                values, turn = worker.turn(number)
            except Closed:
                raise
            except Exception as error:
                self._lost += worker.away is not None  # the unroll it had begun
                self._recovery.recover(worker, error)
                continue
            if worker is self._workers.home:
                began = time.perf_counter()
                self._record(worker, values, turn)
                worker.track.add(COMPUTE, "records", began, time.perf_counter() - began)
            worker.end(turn)
            return

    def _record(self, worker: RunningWorker, values: Values, turn: Turn) -> None:
        """Adds the record of an update; called in the home worker's thread."""
        graph, states = self._graph, self._states
        for message in turn.reports:
            states.copies[message.copy] = _told(message, graph.actor.outputs)
        if self._workers.channels.report is None:
            states.copies = [leaves_of(values, graph.actor.outputs)]
            episodes: list[Leaf] = leaves_of(values, graph.episodes)
        else:
            columns = zip(*[_told(m, graph.episodes) for m in turn.reports], strict=True)
            episodes = [np.concatenate([np.asarray(x) for x in column]) for column in columns]
        state: list[Leaf | None] = []
        # Unpacking the state takes a call, so it is done only where a report will ask for it.
        if turn.number + 1 in self._ends:
            self._ends.discard(turn.number + 1)
            values |= worker.apart(values)
            own = [v for v in graph.state.outputs if v.side == graph.home]
            home = dict(zip(own, leaves_of(values, own), strict=True))
            state = [home.get(v) for v in graph.state.outputs]
        record = UpdateRecord(
            metrics=leaves_of(values, [v for _, v in graph.metrics]),
            episodes=episodes,
            state=state,
            actor=list(states.copies) if state else [],
            parts=[UpdatePart(m.copy, m.turn, turn.number - m.version) for m in turn.reports],
            tapped=leaves_of(values, graph.tapped),
        )
        self._records.add(record)

    def _look(self) -> None:
        """Raises the error of a failed worker, or an error if one is stuck."""
        if self._failure is not None:
            name, error = self._failure
            self._failure = None
            raise WorkerFailed(f"Worker {name} failed: {one_sentence(error)}") from error
        # The watchdog only tells; this raises, in the thread that can end the run.
        try:
            refuse_hung([worker.watch for worker in self._workers.all], self._patience)
            refuse_overdue(self._stop)
        except WorkerFailed:
            # The others wait for the stuck worker: nothing changes the states any more.
            self._broken = True
            self._workers.channels.close()
            raise

    def report(self, iterations: int) -> Report:
        """Waits for that many updates and summarizes them; checks on the workers meanwhile."""
        records = self._records.take(iterations, self._look)
        last = records[-1]
        names = [name for name, _ in self._graph.metrics]
        metrics = sums([record.metrics for record in records])
        self._staleness.extend(part.staleness for record in records for part in record.parts)
        restarts = self._recovery.restarts
        return Report(
            iterations=len(records),
            metrics=dict(zip(names, metrics, strict=True)),
            episodes=sums([record.episodes for record in records]),
            state=partial(self._state, last.state),
            actor=lambda: self._states.actor(last.actor),
            measures=measures_of(self._workers, self._plan, self._staleness, restarts, self._lost),
            spans={worker.name: worker.track.drain() for worker in self._workers.all},
            dropped_spans=sum(worker.track.dropped for worker in self._workers.all),
            finite=all_finite(last.state, self._watched),
            taps=[Tapped(r.tapped, r.parts) for r in records] if self._graph.tap else (),
        )

    def _state(self, leaves: list[Leaf | None], replay: bool = True) -> object:
        """The whole state; with `replay`, waits until other sides have finished their turns.

        Acting copies are not waited for: their state came with the reports.
        """
        if not replay:
            return self._graph.state.tree.unflatten(leaves)
        acting = self._states.acts
        for worker in self._workers.all:
            # After a failure, the remaining turns never end.
            while acting(worker) is None and not self._broken:
                if worker.ended(self._limit - 1, LOOK_SECONDS):
                    break
                self._look()
        if self._broken:
            self._join()
        return self._states.whole(leaves)

    def _join(self) -> None:
        """Waits for the threads to end, for all of them together; a stuck one is abandoned."""
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by fragment, and waiting time by worker."""
        return seconds_of(self._workers)

    def status(self) -> list[Activity]:
        """The current activity of every worker."""
        return [worker.watch.status() for worker in self._workers.all]

    def close(self) -> None:
        """Stops every thread, process and environment; safe to call twice."""
        # First end every wait, then join the threads, then free what they used.
        self._stopping.set()
        if self._host is not None:
            self._host.stop()
        self._watchdog.close()
        with self._may_go_on:
            self._may_go_on.notify_all()
        self._workers.channels.close()
        self._join()
        self._interruption.close()
        self._workers.close()
        if self._host is not None:
            self._host.close()


class PendingUpdates:
    """Updates in progress."""

    def __init__(self, run: Execution, iterations: int) -> None:
        self._run = run
        self._iterations = iterations
        self._report: Report | None = None

    def wait(self) -> Report:
        """Waits for the updates and returns their report."""
        if self._report is None:
            self._report = self._run.report(self._iterations)
        return self._report


def _told(message: Message, values: Sequence[Value]) -> list[Leaf]:
    """Selects values from a report message."""
    assert message.values is not None
    return leaves_of(message.values, values)
