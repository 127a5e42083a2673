"""The interface of hosts, and the supervision of the processes they start.

A host starts a process with some workers, carries calls to it and results back, and creates
references to values. Detection of slow, stuck or dead processes, and their restart, is implemented
here once for every host.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import jax

from dovetail.errors import UserError
from dovetail.runtime.arrays import Values
from dovetail.runtime.channel import Closed
from dovetail.runtime.heartbeat import COMPILE_SECONDS, STOP_SECONDS
from dovetail.runtime.remote import Payload, RemoteWorker, Reply, WorkerLost
from dovetail.runtime.wire import SentValues, pack, pack_values, unpack_values

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

LOOK_SECONDS = 1.0
"""How often to check on a pending call."""
PLACE_SECONDS = 60.0
"""How long a required process may wait for resources."""
CLOSE_SECONDS = 5.0
"""How long a process may take to close its environments."""


class Pulse(NamedTuple):
    """The progress of a worker in another process."""

    quiet: float
    """Seconds since its last progress."""
    warm: bool
    """Whether it has compiled everything."""
    complaint: str
    """The message if it is stuck, with its stack."""


class Call(Protocol[T_co]):
    """A pending call to a process, with its result."""

    def get(self, limit: float | None = None) -> T_co:
        """Waits for the result.

        Raises `TimeoutError` after `limit` seconds, the error of the call, or `WorkerLost` if the
        process has died.
        """
        ...


class HostProcess(Protocol):
    """A process started by a host; it contains a `ProcessWorkers`."""

    def set_up(self) -> Call[str]:
        """Builds the workers; the result names the node of the process."""
        ...

    def call(self, method: str, *args: object) -> Call[Any]:
        """Calls a method of its `ProcessWorkers`, which determines the type of the result.

        The call may wait for `set_up`.
        """
        ...

    def run(
        self, worker: str, chain: int, payloads: Sequence[Payload], shared: Sequence[bool]
    ) -> Call[Reply]:
        """Calls `run`; `shared` payloads of the reply stay in the process, replaced by references.

        `shared` has one entry per payload.
        """
        ...

    def pulse(self, worker: str) -> Pulse | None:
        """See `ProcessWorkers.pulse`; None if it is unavailable. Raises `TimeoutError` if the
        process does not answer."""
        ...

    def awaited(self) -> str:
        """The resources it is waiting for, in words."""
        ...

    def kill(self) -> None:
        """Kills it immediately."""
        ...


class Host(Protocol):
    """Starts processes, and creates references to values that all of them can read."""

    def start(self, name: str, again: bool) -> HostProcess:
        """Starts a process without waiting for it; `again` if it replaces a dead one."""
        ...

    def share(self, values: SentValues) -> Payload:
        """Makes packed values available to every process; returns a reference."""
        ...

    def fetch(self, payload: Payload) -> SentValues:
        """The packed values of a reference."""
        ...


class Supervised:
    """A process of a host, restarted when it dies.

    Several workers may live in one process; their threads call these methods concurrently.
    """

    def __init__(
        self,
        host: Host,
        name: str,
        patience: float,
        stopping: threading.Event,
        optional: bool,
        spared: Callable[[], bool] = lambda: False,
    ) -> None:
        """`optional`: whether the run can start and continue without it. `spared`: whether it can
        continue without it now that it has started."""
        self.name, self.patience, self.optional, self._spared = name, patience, optional, spared
        self.there = False
        """Whether the process is set up."""
        self.stopping = stopping
        self._host = host
        self._lock = threading.Lock()
        self._where = "no node yet"
        self._was_there = False
        self._warm = self._hurried = False
        """Whether the process has compiled everything; whether a stop is requested."""
        self.process: HostProcess | None = host.start(name, again=False)
        self._ready = self.process.set_up()

    def started(self) -> tuple[HostProcess, Call[str]]:
        """The process and its pending `set_up`; restarts it if it was dead."""
        with self._lock:
            if self.process is None:
                self._warm = False
                self.process = self._host.start(self.name, again=True)
                self._ready = self.process.set_up()
            return self.process, self._ready

    def hurry(self) -> None:
        """Waits less for a process that hangs: a stop is requested."""
        self._hurried, self.patience = True, min(self.patience, STOP_SECONDS)

    def wait_until_there(
        self, process: HostProcess, ready: Call[str], tell: Callable[[str], None]
    ) -> None:
        """Waits until the process has its resources and is set up.

        Raises `UserError` if a required process waits too long for resources; an optional one may
        wait forever.
        """
        began, told = time.monotonic(), False
        while True:
            with contextlib.suppress(TimeoutError):
                self._where = self._get(process, ready, LOOK_SECONDS)
                self.there = self._was_there = True
                return
            if self.stopping.is_set():
                raise Closed("stopping")
            waited = time.monotonic() - began
            text = f"{self.name} has waited {waited:.0f} s for {process.awaited()}."
            spared = self.optional or (self._was_there and self._spared())
            if waited > max(PLACE_SECONDS, COMPILE_SECONDS) and not spared:
                raise UserError(text)
            if waited > self.patience and not told:
                told = True
                tell(text)

    def wait(self, process: HostProcess, call: Call[T], worker: str, beat: Callable[[], None]) -> T:
        """Waits for a call and checks on the process meanwhile.

        Called in the thread of a remote worker. Raises the error of the call, `WorkerLost` if the
        process is dead or stuck, or `Closed` if the run ends.
        """
        last = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                return self._get(process, call, LOOK_SECONDS)
            if self.stopping.is_set():
                raise Closed("stopping")
            last = self._look(process, worker, last, beat)

    def _look(
        self, process: HostProcess, worker: str, last: float, beat: Callable[[], None]
    ) -> float:
        """Kills the process if its worker is stuck; returns the time of its last progress."""
        try:
            pulse = process.pulse(worker)
        except TimeoutError:
            pulse = Pulse(time.monotonic() - last, self._warm, "It does not answer.")
        except WorkerLost:
            # The pulse is only asked for while a call is pending.
            return last  # the pending call raises it
        if pulse is None:
            return last
        self._warm = pulse.warm
        # Compiling looks like a hang from outside, so a process that may compile gets more time.
        hurried = self._warm or self._hurried
        limit = self.patience if hurried else max(self.patience, COMPILE_SECONDS)
        if pulse.quiet > limit:
            self.kill(process)
            raise WorkerLost(f"{self.name} on {self._where} hangs, and is ended: {pulse.complaint}")
        # Progress over there is progress of the thread that waits here.
        if pulse.quiet < 2 * LOOK_SECONDS:
            beat()
        return time.monotonic() - min(pulse.quiet, time.monotonic() - last)

    def _get(self, process: HostProcess, call: Call[T], limit: float) -> T:
        try:
            return call.get(limit)
        except WorkerLost as error:
            self.kill(process)
            raise WorkerLost(f"{self.name} on {self._where} is gone ({error}).") from error

    def kill(self, process: HostProcess | None) -> None:
        """Kills this process, but not one that has replaced it in the meantime."""
        with self._lock:
            # Another thread may have restarted it after the same death.
            if self.process is process:
                self.process, self.there = None, False
        if process is not None:
            with contextlib.suppress(Exception):
                process.kill()


class SupervisedWorker:
    """A worker in a supervised process."""

    def __init__(self, within: Supervised, worker: str, tell: Callable[[str], None]) -> None:
        self._within, self._worker, self._tell = within, worker, tell
        self._process: HostProcess | None = None

    def begin(self, held: Values, keys: jax.Array | None) -> Callable[[], Values]:
        """Sets the worker's state as soon as the process is up."""
        within, worker = self._within, self._worker
        process, ready = within.started()
        packed = None if keys is None else pack(keys)
        call: Call[SentValues] = process.call("begin", worker, pack_values(held), packed)

        def begun() -> Values:
            within.wait_until_there(process, ready, self._tell)
            made = within.wait(process, call, worker, lambda: None)
            self._process = process
            return unpack_values(made)

        return begun

    def held(self) -> Values:
        """The current state of the worker."""
        process = self._there()
        call: Call[SentValues] = process.call("held", self._worker)
        return unpack_values(self._within.wait(process, call, self._worker, lambda: None))

    def _there(self) -> HostProcess:
        # A process that replaced ours does not have the state this worker began with.
        within, process = self._within, self._process
        if process is None or within.process is not process:
            raise WorkerLost(f"{within.name}, the process of {self._worker}, is gone.")
        return process

    def run(
        self,
        chain: int,
        payloads: Sequence[Payload],
        shared: Sequence[bool],
        beat: Callable[[], None],
    ) -> Reply:
        """Runs a chain with one call; references are passed through."""
        process = self._there()
        call = process.run(self._worker, chain, payloads, shared)
        return self._within.wait(process, call, self._worker, beat)


class Processes:
    """The other processes of a run, on a host."""

    def __init__(
        self,
        host: Host,
        groups: Mapping[str, Collection[str]],
        patience: float,
        tell: Callable[[str], None],
        optional: Collection[str] = (),
        alike: Collection[str] = (),
    ) -> None:
        """Starts all processes immediately, so that they come up while this one sets up.

        `groups` maps the name of each process to its workers. The run can start and continue
        without the `optional` processes. Once started, it can continue without some of those that
        are `alike`, as long as one of them is there.
        """
        self._host, self._tell = host, tell
        self._stopping = threading.Event()
        self._groups = dict(groups)
        self._supervised = {
            name: Supervised(
                *(host, name, patience, self._stopping, name in optional),
                spared=partial(self._others_are_there, name, alike),
            )
            for name in groups
        }

    def _others_are_there(self, name: str, alike: Collection[str]) -> bool:
        """Whether another process does what this one did."""
        others = [other for other in alike if other != name] if name in alike else []
        return any(self._supervised[other].there for other in others)

    def share(self, values: Values) -> Payload:
        """One reference for all processes."""
        return self._host.share(pack_values(values))

    def fetch(self, payload: Payload) -> Values:
        """The values of a reference, as numpy arrays and random keys."""
        return unpack_values(self._host.fetch(payload))

    def worker(self, name: str) -> RemoteWorker:
        """A worker of one of the processes."""
        group = next(group for group, workers in self._groups.items() if name in workers)
        return SupervisedWorker(self._supervised[group], name, self._tell)

    def hurry(self) -> None:
        """Ends processes that hang soon: a stop is requested."""
        for supervised in self._supervised.values():
            supervised.hurry()

    def stop(self) -> None:
        """Ends all waits for processes."""
        self._stopping.set()

    def close(self) -> None:
        """Stops all processes in parallel."""
        self._stopping.set()
        running = [s.process for s in self._supervised.values() if s.process is not None]
        calls = [process.call("close") for process in running]
        deadline = time.monotonic() + CLOSE_SECONDS  # one for all of them
        for call in calls:
            with contextlib.suppress(Exception):
                call.get(max(0.0, deadline - time.monotonic()))
        for supervised in self._supervised.values():
            supervised.kill(supervised.process)


def in_parts(reply: Reply, shared: Sequence[bool]) -> tuple[Reply, list[Payload]]:
    """Splits a reply into one without its shared payloads, and these payloads."""
    pairs = list(zip(reply.payloads, shared, strict=True))
    kept = [None if is_shared else payload for payload, is_shared in pairs]
    return replace(reply, payloads=kept), [p for p, is_shared in pairs if is_shared]


def whole(reply: Reply, shared: Sequence[bool], references: Sequence[Payload]) -> Reply:
    """Inverse of `in_parts`, with references in place of shared payloads."""
    left = iter(references)
    pairs = zip(reply.payloads, shared, strict=True)
    return replace(
        reply, payloads=[next(left) if is_shared else payload for payload, is_shared in pairs]
    )
