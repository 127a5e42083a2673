"""A host that spawns processes on this machine and talks to them through pipes.

A process answers the calls to each of its workers one at a time, and reports their progress
meanwhile. It exits when its parent dies.
"""

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

from dovetail.envs.child import leave_signals_to_parent
from dovetail.envs.member import starting_process
from dovetail.errors import UserError
from dovetail.hosts.interface import LOOK_SECONDS, Pulse
from dovetail.hosts.job import Job, prepare
from dovetail.loading import UNGUARDED, main_file, unguarded
from dovetail.runtime.remote import Payload, Reply, WorkerLost
from dovetail.runtime.wire import SentValues

if TYPE_CHECKING:
    from dovetail.hosts.serving import ProcessWorkers

T = TypeVar("T")
SPAWN = multiprocessing.get_context("spawn")
"""JAX's threads do not survive a fork."""
END_SECONDS = 2.0
"""Time limit for joining a process."""
SET_UP, PULSE = "set_up", "pulse"


class SpawnedHost:
    """Spawns processes with the workers of a plan."""

    def __init__(self, job: Job, groups: Mapping[str, Sequence[str]]) -> None:
        """`groups` maps the name of each process to its workers."""
        self._order, self._groups = _packed(job), groups

    def start(self, name: str, again: bool) -> "SpawnedProcess":
        """Spawns a process."""
        return SpawnedProcess(name, self._order, tuple(self._groups[name]))

    def share(self, values: SentValues) -> Payload:
        """The values themselves: a pipe has no shared store."""
        return values

    def fetch(self, payload: Payload) -> SentValues:
        """The payload itself, received through the pipe."""
        return cast(SentValues, payload)


def _packed(job: Job) -> bytes:
    try:
        sent = bytes(ForkingPickler.dumps(job))
        if b"__main__" in sent and main_file() is None:
            raise TypeError("a class is defined in a notebook or on standard input")
        return sent
    except Exception as error:
        raise UserError(
            f"The algorithm, the environment or the strategy cannot be sent to a process of its "
            f"own ({error}): define their classes at the top of a file, not inside a function."
        ) from error


class Request(NamedTuple):
    """A call, as sent through the pipe."""

    number: int
    method: str
    args: tuple[object, ...]
    """The first is the name of the worker, if the method concerns one."""


class Answer(NamedTuple):
    """The result of a call, or the error it raised."""

    number: int
    """That of the request."""
    value: object = None
    error: BaseException | None = None


class SpawnedProcess:
    """A spawned process, and the thread that receives its answers."""

    def __init__(self, name: str, order: bytes, workers: tuple[str, ...]) -> None:
        self._name = name
        self._connection, there = SPAWN.Pipe()
        self._process = SPAWN.Process(
            target=serve, args=(there, order, workers), name=f"dovetail-{name}", daemon=True
        )
        # A spawned process imports the main module only if the job refers to something in it.
        with starting_process(b"__main__" in order):
            self._process.start()
        there.close()  # else reading from a dead process would block instead of raising EOFError
        self._numbers = itertools.count()
        self._pending: dict[int, Future[object]] = {}
        self._lock = threading.Lock()
        self._gone = ""
        """Why it died; empty while it is alive."""
        # The only reader of the pipe, since answers come in any order.
        hearing = threading.Thread(target=self._hear, name=f"dovetail-{name}-calls", daemon=True)
        hearing.start()

    def set_up(self) -> "SpawnedCall[str]":
        """Builds the workers."""
        return self.call(SET_UP)

    def call(self, method: str, *args: object) -> "SpawnedCall[Any]":
        """Calls a method of its workers, from any thread."""
        answer: Future[object] = Future()
        # Under the lock, so that either `_hear` finds this call pending or we see `_gone`.
        with self._lock:
            number = next(self._numbers)
            self._pending[number] = answer
            try:
                self._connection.send(Request(number, method, args))
            except (OSError, ValueError):
                self._gone = self._gone or "its pipe is closed"
            if self._gone:
                self._pending.pop(number, None)
                answer.set_exception(WorkerLost(self._gone))
        return SpawnedCall(answer)

    def run(
        self, worker: str, chain: int, payloads: Sequence[Payload], shared: Sequence[bool]
    ) -> "SpawnedCall[Reply]":
        """Runs a chain; all payloads come back through the pipe."""
        return self.call("run", worker, chain, list(payloads))

    def pulse(self, worker: str) -> Pulse | None:
        """The progress of a worker."""
        return self.call(PULSE, worker).get(LOOK_SECONDS)

    def awaited(self) -> str:
        """It only has to start."""
        return "its process to start"

    def kill(self) -> None:
        """Kills the process."""
        with contextlib.suppress(ValueError):
            self._process.kill()
            self._process.join(END_SECONDS)

    def _hear(self) -> None:
        """Delivers answers to their callers until the process dies; the body of the thread."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                said: Answer = self._connection.recv()
                with self._lock:
                    answer = self._pending.pop(said.number)
                if said.error is not None:
                    answer.set_exception(said.error)
                else:
                    answer.set_result(said.value)
        self._process.join(END_SECONDS)
        code = self._process.exitcode
        why = f"exit code {code}"
        if code is not None and code < 0:
            why = f"it was killed by {signal.Signals(-code).name}"
        with self._lock:
            self._gone = why
            pending, self._pending = self._pending, {}
            self._connection.close()
        lost = unguarded("A class of this run") if code == UNGUARDED else WorkerLost(why)
        for answer in pending.values():  # no answer will come
            answer.set_exception(lost)


class SpawnedCall(Generic[T]):
    """A pending call."""

    def __init__(self, answer: "Future[T]") -> None:
        self._answer = answer

    def get(self, limit: float | None = None) -> T:
        """Waits for the result, or raises the error of the call."""
        return self._answer.result(limit)


def serve(connection: Connection, order: bytes, workers: tuple[str, ...]) -> None:
    """The main function of a spawned process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    leave_signals_to_parent()
    serving = _Serving(connection, order, workers)
    with contextlib.suppress(EOFError, OSError):
        while True:
            serving.answer(connection.recv())
    os._exit(0)  # the parent is gone: abandon running work


class _Serving:
    """Answers calls: `pulse` immediately, the others in one thread per worker, in order."""

    def __init__(self, connection: Connection, order: bytes, workers: tuple[str, ...]) -> None:
        self._connection, self._order, self._names = connection, order, workers
        self._workers: ProcessWorkers | None = None
        self._sending = threading.Lock()
        # One thread per worker keeps the order of its calls; workers do not wait for each other.
        pools = {name: ThreadPoolExecutor(1, f"dovetail-{name}") for name in (SET_UP, *workers)}
        self._pools = pools
        self._there = threading.Event()

    def answer(self, request: "Request") -> None:
        """Starts to answer a call."""
        number, worker = request.number, str(request.args[0]) if request.args else ""
        if request.method == PULSE:
            pulse = Pulse(0.0, False, "It is being set up.")
            if self._there.is_set() and self._workers is not None:
                pulse = self._workers.pulse(worker)
            self._send(Answer(number, pulse))
        elif request.method == SET_UP:
            self._pools[SET_UP].submit(self._do, number, self._set_up)
        elif request.method == "close":
            self._pools[SET_UP].submit(self._do, number, self._close)
        else:
            self._pools[worker].submit(self._do, number, partial(self._called, request))

    def _called(self, request: "Request") -> object:
        """Calls a method of the workers, once they are there."""
        self._there.wait()
        if self._workers is None:
            raise WorkerLost("it could not be set up")
        return getattr(self._workers, request.method)(*request.args)

    def _set_up(self) -> str:
        """Builds the workers; runs in the process, in a thread of its own."""
        from dovetail.hosts.serving import ProcessWorkers

        try:
            job: Job = getattr(ForkingPickler, "loads")(self._order)  # noqa: B009  (its stub is wrong)
            prepare(job, gpus=0)
            graph, env = job.build(job.plan)
            self._workers = ProcessWorkers(graph, job.plan, env, job.patience, self._names)
        finally:
            # Also after a failure, else calls that wait for the workers would never return.
            self._there.set()
        return "this machine"

    def _close(self) -> None:
        if self._workers is not None:
            self._workers.close()

    def _do(self, number: int, function: Callable[[], object]) -> None:
        try:
            self._send(Answer(number, function()))
        except BaseException as error:
            self._send(Answer(number, error=error))

    def _send(self, answer: "Answer") -> None:
        """Sends an answer; ends this process if the parent is gone."""
        with self._sending:  # the threads of several workers answer
            try:
                self._connection.send(answer)
            except (OSError, BrokenPipeError):
                os._exit(0)
            except Exception:  # the value or the error cannot be pickled
                text = f"{type(answer.error).__name__}: {answer.error}"
                self._connection.send(Answer(answer.number, error=UserError(text)))
