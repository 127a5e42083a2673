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
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from dovetail.envs.member import starting_process
from dovetail.errors import UserError
from dovetail.hosts.interface import LOOK_SECONDS
from dovetail.hosts.job import Job, prepare
from dovetail.loading import UNGUARDED, main_file, unguarded
from dovetail.runtime.packing import Values
from dovetail.runtime.remote import Payload, WorkerLost

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

    def share(self, values: Values) -> Payload:
        """The values themselves: a pipe has no shared store."""
        return values

    def fetch(self, payload: Payload) -> Values:
        """The payload itself, received through the pipe."""
        return payload


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


class SpawnedProcess:
    """A spawned process, and the thread that receives its answers."""

    def __init__(self, name: str, order: bytes, workers: tuple[str, ...]) -> None:
        self._name = name
        self._connection, there = SPAWN.Pipe()
        self._process = SPAWN.Process(
            target=serve, args=(there, order, workers), name=f"dovetail-{name}", daemon=True
        )
        with starting_process(b"__main__" in order):
            self._process.start()
        there.close()  # else reading from a dead process would block instead of raising EOFError
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._gone = ""
        """Why it died; empty while it is alive."""
        hearing = threading.Thread(target=self._hear, name=f"dovetail-{name}-calls", daemon=True)
        hearing.start()

    def set_up(self) -> "SpawnedCall":
        """Builds the workers."""
        return self.call(SET_UP)

    def call(self, method: str, *args: Any) -> "SpawnedCall":
        """Calls a method of its workers."""
        answer: Future[Any] = Future()
        # Under the lock, so that either `_hear` finds this call pending or we see `_gone`.
        with self._lock:
            number = next(self._numbers)
            self._pending[number] = answer
            try:
                self._connection.send((number, method, args))
            except (OSError, ValueError):
                self._gone = self._gone or "its pipe is closed"
            if self._gone:
                self._pending.pop(number, None)
                answer.set_exception(WorkerLost(self._gone))
        return SpawnedCall(answer)

    def run(
        self, worker: str, chain: int, payloads: Sequence[Payload], shared: Sequence[bool]
    ) -> "SpawnedCall":
        """Runs a chain; all payloads come back through the pipe."""
        return self.call("run", worker, chain, list(payloads))

    def pulse(self, worker: str) -> tuple[float, bool, str] | None:
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
                number, value, error = self._connection.recv()
                with self._lock:
                    answer = self._pending.pop(number)
                answer.set_exception(error) if error is not None else answer.set_result(value)
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


class SpawnedCall:
    """A pending call."""

    def __init__(self, answer: "Future[Any]") -> None:
        self._answer = answer

    def get(self, limit: float | None = None) -> Any:
        """Waits for the result, or raises the error of the call."""
        return self._answer.result(limit)


def serve(connection: Connection, order: bytes, workers: tuple[str, ...]) -> None:
    """The main function of a spawned process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    serving = _Serving(connection, order, workers)
    with contextlib.suppress(EOFError, OSError):
        while True:
            serving.answer(*connection.recv())
    os._exit(0)  # the parent is gone: abandon running work


class _Serving:
    """Answers calls: `pulse` immediately, the others in one thread per worker, in order."""

    def __init__(self, connection: Connection, order: bytes, workers: tuple[str, ...]) -> None:
        self._connection, self._order, self._names = connection, order, workers
        self._workers: Any = None
        self._sending = threading.Lock()
        pools = {name: ThreadPoolExecutor(1, f"dovetail-{name}") for name in (SET_UP, *workers)}
        self._pools = pools
        self._there = threading.Event()

    def answer(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        """Starts to answer a call."""
        if method == PULSE:
            pulse = (0.0, False, "It is being set up.")
            if self._there.is_set():
                pulse = self._workers.pulse(*args)
            self._send(number, pulse, None)
        elif method == SET_UP:
            self._pools[SET_UP].submit(self._do, number, self._set_up, ())
        elif method == "close":
            self._pools[SET_UP].submit(self._do, number, self._close, ())
        else:
            self._pools[args[0]].submit(self._do, number, self._called(method), args)

    def _called(self, method: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._there.wait()
            if self._workers is None:
                raise WorkerLost("it could not be set up")
            return getattr(self._workers, method)(*args)

        return call

    def _set_up(self) -> str:
        from dovetail.hosts.serving import ProcessWorkers

        try:
            load: Any = getattr(ForkingPickler, "loads")  # noqa: B009  (its stub is wrong)
            job: Job = load(self._order)
            prepare(job, gpus=0)
            graph, env = job.build(job.plan)
            self._workers = ProcessWorkers(graph, job.plan, env, job.patience, self._names)
        finally:
            self._there.set()
        return "this machine"

    def _close(self) -> None:
        if self._workers is not None:
            self._workers.close()

    def _do(self, number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            self._send(number, function(*args), None)
        except BaseException as error:
            self._send(number, None, error)

    def _send(self, number: int, value: Any, error: BaseException | None) -> None:
        with self._sending:
            try:
                self._connection.send((number, value, error))
            except (OSError, BrokenPipeError):
                os._exit(0)
            except Exception:  # the value or the error cannot be pickled
                text = f"{type(error).__name__}: {error}"
                self._connection.send((number, None, UserError(text)))
