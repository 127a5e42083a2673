"""Runs the workers of a plan on this machine, and looks after them.

If one worker does everything but stepping, it runs in the caller's thread; otherwise each worker
has a thread of its own. Environments and actors that fail are set up again, with a limit and a
growing pause; a learner that fails ends the run. Who waits hears who failed, and with what.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.envs.member import ProcessFailed
from dovetail.envs.resolve import Env
from dovetail.errors import UserError
from dovetail.graph.ir import Graph, Side, Value
from dovetail.graph.unroll import ActorState
from dovetail.plan.ir import Plan
from dovetail.runtime.away import Abroad, OutpostLost
from dovetail.runtime.exchange import Closed, Parcel, staleness_counts
from dovetail.runtime.hosting import steps_apart
from dovetail.runtime.inference import BatchedUnroll
from dovetail.runtime.placing import mesh_of, replicated, to_device
from dovetail.runtime.programs import Values
from dovetail.runtime.report import Report, all_finite, sums
from dovetail.runtime.schedule import Crew
from dovetail.runtime.stage import begin_episodes
from dovetail.runtime.watch import Watchdog
from dovetail.runtime.worker import Turn, Worker
from dovetail.telemetry.spans import COMPUTE, WAIT

RESTARTS = 5
"""How often a worker is set up again before its failure ends the run."""
CALM_SECONDS = 60.0
"""After so long without a failure a worker's restarts are forgotten."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before a restart: doubled from one to the next."""
LOOK_SECONDS = 0.25
"""How often who waits looks at whether a worker has failed."""
GRACE = 3.0
"""Seconds that a worker has more than its environments' processes to say what is wrong."""
JOIN_SECONDS = 10.0
"""How long a worker's thread is waited for at the end."""


LOST = ", with what it held at the last checkpoint: later items are lost"
"""What is told of a worker that kept a part of the replay."""


class WorkerFailed(UserError):
    """A worker raised something; `__cause__` is what."""


@dataclass(frozen=True)
class Record:
    """One update, as the learner's worker leaves it."""

    metrics: list[Any]
    episodes: list[Any]
    state: list[Any]
    """Empty unless it is the last update that was asked for: what nobody reads makes room."""
    actor: list[list[Any]]
    """Of each copy; empty as well."""
    staleness: list[int]


class Restarts:
    """How often something was set up again, and how long to pause before the next time."""

    def __init__(self) -> None:
        self.total = 0
        self._recent = 0
        self._since = time.monotonic()

    def failed(self) -> None:
        """What had worked failed; earlier failures are forgotten if that was long ago."""
        if time.monotonic() - self._since > CALM_SECONDS:
            self._recent = 0

    def works(self) -> None:
        """It was set up again."""
        self._since = time.monotonic()

    def allowed(self) -> bool:
        """Counts a restart; False if there were too many."""
        self._recent += 1
        self.total += 1
        return self._recent <= RESTARTS

    def pause(self) -> float:
        """Seconds to wait."""
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self._recent - 1))


class CrewRun:
    """Workers in threads, or one in the caller's."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        env: Env,
        patience: float,
        tell: Callable[[str], None],
        abroad: Abroad | None = None,
        here: Collection[str] | None = None,
    ) -> None:
        self._graph, self._plan, self._env = graph, plan, env
        self._patience, self._tell = patience, tell
        self._abroad = abroad
        self._crew = Crew(graph, plan, env, patience, abroad, here)
        self._restarts = {worker.name: Restarts() for worker in self._crew.workers}
        self._records: deque[Record] = deque()
        self._wanted = 1
        self._enough = threading.Event()
        """Set when there are as many records as are wanted: who collects is woken once for all."""
        self._limit = self._done = 0
        self._ends: set[int] = set()
        """After which updates the states are wanted."""
        self._lost = 0
        """Unrolls that were begun in another process and never came."""
        self._may_go_on = threading.Condition()
        self._failure: tuple[str, BaseException] | None = None
        self._actor_states: list[list[Any]] = []
        self._replay_parts: dict[str, list[Any]] = {}
        """By worker, its part of the replay as it was at the start, or at the last checkpoint."""
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._staleness: deque[int] = deque(maxlen=10_000)
        self._keys: Any = None
        self._watched: Sequence[int] = ()
        self._coming: dict[str, Callable[[], None]] = {}
        watches = [worker.watch for worker in self._crew.workers]
        self._watchdog = Watchdog(watches, patience, tell)

    def compile(self, state: Any, actor: Any) -> None:
        """Compiles every fragment; their shapes are the graph's."""
        self._crew.programs.compile()

    def load(
        self,
        state: Any,
        actor: ActorState,
        episode_keys: jax.Array,
        first_turn: int,
        watched: Sequence[int] = (),
    ) -> Any:
        """Sets what the next iteration starts from, and begins an episode in every host
        environment; returns the actors' state with what these show."""
        graph, plan = self._graph, self._plan
        self._crew.links.begin_at(first_turn)
        self._limit = self._done = first_turn
        self._watched = watched
        self._keys = episode_keys
        size = plan.num_envs // plan.actors
        self._actor_states = []
        for copy in range(plan.actors):
            part = slice(copy * size, (copy + 1) * size)
            own = jax.tree.map(lambda x, part=part: x[part], actor) if plan.actors > 1 else actor
            self._actor_states.append(jax.tree.leaves(own))
        for worker in self._crew.workers:
            worker.held = {}
            leaves = zip(graph.state.inputs, jax.tree.leaves(state), strict=True)
            if worker.errands is not None:
                self._replay_parts[worker.name] = self._part(worker.copy, leaves)
                self._begin_keeper(worker)
                continue
            if worker is self._crew.learner:
                apart = bool(self._crew.keepers)
                own = {
                    v.id: jnp.copy(x) if v.side is Side.REPLAY else x
                    for v, x in leaves
                    if not apart or v.side is not Side.REPLAY
                }
                worker.hold(own)
                self.refill([own[graph.state.inputs[i].id] for i in graph.data])
            if worker is not self._crew.learner or self._crew.is_one:
                self._set_actor(worker, self._actor_states[worker.copy])
                if worker.away is None:
                    self._begin_stage(worker)
        self._reach_away()
        return self.actor_state()

    def refill(self, data: Sequence[Any]) -> None:
        """Sets the recorded steps that the next iterations draw from."""
        learner = self._crew.learner
        devices = [jax.devices()[i] for i in self._plan.worker(learner.name).devices]
        if len(devices) > 1:
            mesh = mesh_of(devices)
            data = [replicated(leaf, mesh) for leaf in data]
        elif self._crew.programs.many_devices:
            data = [to_device(_array(leaf), devices[0]) for leaf in data]
        numbers = (self._graph.state.inputs[i].id for i in self._graph.data)
        learner.held |= dict(zip(numbers, data, strict=True))

    def _part(self, shard: int, leaves: Iterable[tuple[Value, Any]]) -> list[Any]:
        """What a worker holds of the replay's leaves: they are of all shards if there are more."""
        several = self._plan.shards > 1
        kept = [leaf for value, leaf in leaves if value.side is Side.REPLAY]
        return [leaf[shard] if several else leaf for leaf in kept]

    def _begin_keeper(self, worker: Worker) -> None:
        """Gives a worker its part of the replay as it last was when that was asked for."""
        part = self._replay_parts[worker.name]
        if worker.away is not None:
            worker.away.hold(part)
            return
        numbers = [v.id for v in self._graph.state.inputs if v.side is Side.REPLAY]
        worker.held = {}
        worker.hold({n: jnp.copy(leaf) for n, leaf in zip(numbers, part, strict=True)})

    def _reach_away(self) -> None:
        """Sets the environments of workers in other processes, all at a time; those that the run
        can begin without are waited for by their own threads."""
        away = [w for w in self._crew.workers if w.away is not None and w.errands is None]
        coming = {worker.name: self._begin(worker, 0) for worker in away}
        needed = len(away) if self._plan.fewest is None else self._plan.fewest
        for worker in away[:needed]:
            try:
                coming.pop(worker.name)()
            except OutpostLost as error:
                self._recover(worker, error)
        self._coming = coming

    def _set_actor(self, worker: Worker, leaves: list[Any]) -> None:
        number = self._plan.worker(worker.name).devices[0]
        if self._crew.programs.many_devices and worker.away is None:
            leaves = [to_device(x, jax.devices()[number]) for x in map(_array, leaves)]
        numbers = (value.id for value in self._graph.actor.inputs)
        worker.held |= dict(zip(numbers, leaves, strict=True))

    def _begin_stage(self, worker: Worker) -> None:
        """Sets a worker's environments; a process that was killed meanwhile is started again."""
        try:
            self._set_stage(worker, 0)
        except ProcessFailed as error:
            if error.traceback:  # it raised, and would again
                raise
            self._recover(worker, error)

    def _set_stage(self, worker: Worker, attempt: int) -> None:
        """Sets a worker's environments anew; host environments begin new episodes."""
        self._begin(worker, attempt)()

    def _begin(self, worker: Worker, attempt: int) -> Callable[[], None]:
        """Begins to set a worker's environments; what it returns waits until they are."""
        size = self._plan.num_envs // self._plan.actors
        keys = self._keys[worker.copy * size : (worker.copy + 1) * size]
        if attempt:
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys, 1_000_000 + attempt)
        actor = self._actor(worker)
        if worker.away is not None:
            coming = worker.away.begin(jax.tree.leaves(actor), keys)
            return lambda: self._keep_actor(worker, coming())
        stage = self._crew.programs.stages.get(worker.name)
        begun = begin_episodes(self._env, stage, actor, keys)
        self._keep_actor(worker, jax.tree.leaves(begun))
        return lambda: None

    def _keep_actor(self, worker: Worker, leaves: list[Any]) -> None:
        self._set_actor(worker, leaves)
        self._actor_states[worker.copy] = leaves

    def _actor(self, worker: Worker) -> ActorState:
        leaves = [worker.held[value.id] for value in self._graph.actor.inputs]
        return self._graph.actor.tree.unflatten(leaves)

    def warm_up(self) -> None:
        """Compiles the acting programs, where all they take is there before an iteration."""
        state = self._crew.learner.held
        for program, worker in self._crew.programs.acting:
            values = {**state, **worker.held}
            if program.can_warm_up(values):
                program.warm_up(values)

    def advance(self, iterations: int) -> "Coming":
        """Lets the workers go on for that many updates."""
        self._ends.add(self._limit + iterations)
        if self._crew.is_one:
            [worker] = self._crew.workers
            worker.watch.begin()
            if worker.track.paused is not None:
                spent = time.perf_counter() - worker.track.paused
                worker.track.add(WAIT, "leave to go on", worker.track.paused, spent)
            for number in range(self._done, self._done + iterations):
                self._turn(worker, number)
            worker.track.paused = time.perf_counter()
            self._done = self._limit = self._done + iterations
            return Coming(self, iterations)
        with self._may_go_on:
            self._limit += iterations
            self._crew.learner.watch.beat()  # what it waited for until now was us
            self._may_go_on.notify_all()
        if not self._threads:
            self._start()
        return Coming(self, iterations)

    def _start(self) -> None:
        for worker in self._crew.workers:
            thread = threading.Thread(
                target=self._work, args=(worker,), name=f"dovetail-{worker.name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _work(self, worker: Worker) -> None:
        """A worker's thread."""
        worker.watch.begin()
        number = self._done
        try:
            self._join(worker)
            while not self._stopping.is_set():
                if worker is self._crew.learner:
                    self._wait_for_leave(worker, number)
                self._turn(worker, number)
                number += 1
        except Closed:
            pass
        except BaseException as error:
            if self._failure is None and not self._stopping.is_set():
                self._failure = worker.name, error
            self._crew.links.close()

    def _join(self, worker: Worker) -> None:
        """Waits for a worker that may come later."""
        coming = self._coming.get(worker.name)
        if coming is None:
            return
        worker.watch.idle("room on the cluster")
        try:
            coming()
        except OutpostLost as error:
            self._recover(worker, error)
        self._tell(f"{worker.name} has joined.")

    def _wait_for_leave(self, worker: Worker, number: int) -> None:
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

    def _turn(self, worker: Worker, number: int) -> None:
        """One iteration of a worker, tried again if its environments failed."""
        while True:
            try:
                values, turn = worker.turn(number)
            except Closed:
                raise
            except Exception as error:
                self._lost += worker.away is not None
                self._recover(worker, error)
                continue
            if worker is self._crew.learner:
                began = time.perf_counter()
                self._record(worker, values, turn)
                worker.track.add(COMPUTE, "records", began, time.perf_counter() - began)
            return

    def _recover(self, worker: Worker, error: Exception) -> None:
        """Sets a worker's environments up again, or raises the error for good."""
        apart = worker is not self._crew.learner
        apart = apart or steps_apart(self._graph, self._plan, worker.name)
        if worker.errands is not None:
            apart = worker.away is not None
        restarts = self._restarts[worker.name]
        failed: Exception | None = error
        restarts.failed()
        worker.watch.doing("setting up its environments")
        while failed is not None:
            if not apart or self._stopping.is_set() or not restarts.allowed():
                raise failed
            pause = restarts.pause()
            again = "it is" if worker.away is not None else "its environments are"
            lost = "" if worker.errands is None else LOST
            self._tell(
                f"{worker.name} failed; {again} set up again in {pause:.1f} s{lost} "
                f"(restart {restarts.total}): {_sentence(failed)}"
            )
            if self._stopping.wait(pause):
                raise Closed("stopping")
            try:
                if worker.errands is not None:
                    self._begin_keeper(worker)
                else:
                    self._set_stage(worker, restarts.total)
                failed = None
                restarts.works()
            except Exception as again:
                failed = again

    def _record(self, worker: Worker, values: Values, turn: Turn) -> None:
        """Notes an update; the arrays that were learned from may be written again."""
        graph = self._graph
        parcels = [parcel for parcel in turn.parcels if parcel.actor]
        for parcel in parcels:
            self._actor_states[parcel.copy] = parcel.actor
        if self._crew.is_one:
            self._actor_states = [[values[v.id] for v in graph.actor.outputs]]
            episodes = [values[v.id] for v in graph.episodes]
        else:
            episodes = _joined_episodes(parcels)
        state: list[Any] = []
        if turn.number + 1 in self._ends:
            self._ends.discard(turn.number + 1)
            values |= worker.apart(values)
            outputs = graph.state.outputs
            state = [None if v.side is Side.REPLAY else values[v.id] for v in outputs]
        record = Record(
            metrics=[values[v.id] for _, v in graph.metrics],
            episodes=episodes,
            state=state,
            actor=list(self._actor_states) if state else [],
            staleness=staleness_counts(parcels, turn.number),
        )
        for release in [*turn.releases, *(r for parcel in parcels for r in parcel.releases)]:
            release()
        self._records.append(record)
        if len(self._records) >= self._wanted:
            self._enough.set()

    def collect(self, iterations: int) -> list[Record]:
        """The records of that many updates; waits, and looks after the workers meanwhile."""
        self._look()
        self._wanted = iterations
        self._enough.clear()
        while len(self._records) < iterations:
            if not self._enough.wait(LOOK_SECONDS):
                self._look()
        return [self._records.popleft() for _ in range(iterations)]

    def _look(self) -> None:
        """Raises what a worker failed with, or that one hangs."""
        if self._failure is not None:
            name, error = self._failure
            self._failure = None
            raise WorkerFailed(f"Worker {name} failed: {_sentence(error)}") from error
        watches = [worker.watch for worker in self._crew.workers]
        limit = self._patience + GRACE
        if not self._crew.is_one and all(w.waits and w.quiet() > limit for w in watches):
            waits = "; ".join(f"{w.worker} waits for {w.awaited}" for w in watches)
            raise WorkerFailed(f"Every worker waits for another: {waits}.")
        for watch in watches:
            if watch.stepping and watch.late(limit):
                raise WorkerFailed(
                    f"A worker hangs: {watch.complaint()}A thread cannot be ended from outside; "
                    f"with --processes its environments can."
                )

    def report(self, records: list[Record]) -> Report:
        """The records as one report."""
        last = records[-1]
        names = [name for name, _ in self._graph.metrics]
        metrics = sums([record.metrics for record in records])
        self._staleness.extend(s for record in records for s in record.staleness)
        return Report(
            iterations=len(records),
            metrics=dict(zip(names, metrics, strict=True)),
            episodes=sums([record.episodes for record in records]),
            state=partial(self._state, last.state),
            actor=lambda: self._whole(last.actor),
            measures=self._measures(),
            spans={worker.name: worker.track.drain() for worker in self._crew.workers},
            dropped_spans=sum(worker.track.dropped for worker in self._crew.workers),
            finite=all_finite(last.state, self._watched),
        )

    def _state(self, leaves: list[Any], replay: bool = True) -> Any:
        return self._graph.state.tree.unflatten(self._present(leaves) if replay else leaves)

    def _present(self, leaves: list[Any]) -> list[Any]:
        """The learner's state as it was, with what its replay holds by now: that changes in place,
        and is that of the state only while nothing goes on."""
        inputs = self._graph.state.inputs
        held = self._crew.learner.all_held()
        if self._crew.keepers:
            parts = [self._kept(worker) for worker in self._crew.keepers]
            columns = map(list, zip(*parts, strict=True))
            whole = [jnp.stack(column) if len(parts) > 1 else column[0] for column in columns]
            numbers = [value.id for value in inputs if value.side is Side.REPLAY]
            held = dict(zip(numbers, whole, strict=True))
        return [
            held[value.id] if value.side is Side.REPLAY else leaf
            for value, leaf in zip(inputs, leaves, strict=True)
        ]

    def _kept(self, worker: Worker) -> list[Any]:
        """A worker's part of the replay, once it has done all that it was asked for."""
        assert worker.errands is not None
        while not worker.errands.wait_until(self._limit, LOOK_SECONDS):
            self._look()
        if worker.away is not None:
            part = [_array(leaf) for leaf in worker.away.held()]
            self._replay_parts[worker.name] = part
            return part
        numbers = [v.id for v in self._graph.state.inputs if v.side is Side.REPLAY]
        held = worker.all_held()
        return [held[number] for number in numbers]

    def actor_state(self) -> Any:
        """The actors' state, of all copies."""
        return self._whole(self._actor_states)

    def _whole(self, copies: list[list[Any]]) -> Any:
        if len(copies) == 1:
            return self._graph.actor.tree.unflatten(copies[0])
        device = jax.local_devices()[0]
        columns = zip(*copies, strict=True)
        leaves = [jnp.concatenate([to_device(_array(x), device) for x in c]) for c in columns]
        return self._graph.actor.tree.unflatten(leaves)

    def _measures(self) -> dict[str, float]:
        found: dict[str, float] = {}
        if not self._crew.is_one and self._staleness:
            found["staleness"] = float(np.mean(self._staleness))
            found["staleness_max"] = float(max(self._staleness))
            found["dropped"] = float(self._crew.links.dropped)
        restarts = sum(restarts.total for restarts in self._restarts.values())
        if len(self._plan.workers) > 1:
            found["restarts"] = float(restarts)
        calls = sum(program.calls for program, _ in self._crew.remote)
        if calls:
            spent = sum(worker.seconds.get(p.name, 0.0) for p, worker in self._crew.remote)
            inside = sum(program.inside for program, _ in self._crew.remote)
            found["message_ms"] = 1e3 * (spent - inside) / calls
            found["lost_unrolls"] = float(self._lost)
        for program, _ in self._crew.programs.acting:
            if isinstance(program, BatchedUnroll) and program.calls:
                found["act_batch"] = program.served / program.calls
        return found

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by fragment, an unroll's two halves apart, on average over its copies; waits by
        worker."""
        spent: dict[str, list[float]] = {}
        programs = [program for program, _ in (*self._crew.programs.acting, *self._crew.remote)]
        apart = {program.name for program in programs}
        for worker in self._crew.workers:
            for name, seconds in worker.seconds.items():
                if name not in apart:
                    spent.setdefault(name, []).append(seconds)
            if not self._crew.is_one:
                spent[f"wait_{worker.name}"] = [worker.watch.waited]
        for program in programs:
            for name, seconds in program.seconds.items():
                spent.setdefault(name, []).append(seconds)
        return {name: sum(copies) / len(copies) for name, copies in spent.items()}

    def status(self) -> list[dict[str, Any]]:
        """What every worker is at."""
        return [worker.watch.status() for worker in self._crew.workers]

    def close(self) -> None:
        """Ends every thread, process and environment; safe to call twice."""
        self._stopping.set()
        if self._abroad is not None:
            self._abroad.stop()
        self._watchdog.close()
        with self._may_go_on:
            self._may_go_on.notify_all()
        self._crew.links.close()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
        self._crew.close()


class Coming:
    """Updates that the workers are at."""

    def __init__(self, run: CrewRun, iterations: int) -> None:
        self._run = run
        self._iterations = iterations
        self._report: Report | None = None

    def wait(self) -> Report:
        """Waits until they are done."""
        if self._report is None:
            self._report = self._run.report(self._run.collect(self._iterations))
        return self._report


def _joined_episodes(parcels: list[Parcel]) -> list[Any]:
    columns = zip(*[parcel.episodes for parcel in parcels], strict=True)
    return [np.concatenate([np.asarray(x) for x in column]) for column in columns]


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def _sentence(error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {error}"
