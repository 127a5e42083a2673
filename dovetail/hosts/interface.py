"""What a host is, and the supervision of the processes that it starts.

A host starts a process with some workers, carries calls to it and their results back, and makes
references that stand for values. Whether a process is late, hangs or is gone, and what is done
about it, is decided here, once, for every host.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from dovetail.errors import UserError
from dovetail.runtime.channel import Closed
from dovetail.runtime.heartbeat import COMPILE_SECONDS
from dovetail.runtime.packing import Values
from dovetail.runtime.remote import Payload, RemoteWorker, Reply, WorkerLost
from dovetail.runtime.wire import pack, pack_values, unpack_values

LOOK_SECONDS = 1.0
"""How often a call that is waited for is looked at."""
PLACE_SECONDS = 60.0
"""How long a process that the run cannot do without may wait for room."""
CLOSE_SECONDS = 5.0
"""How long a process may take to end its environments."""


class Call(Protocol):
    """A call that a process is answering."""

    def get(self, limit: float | None = None) -> Any:
        """Its result. Raises `TimeoutError` after `limit` seconds, what the call raised, or
        `WorkerLost` if the process is gone."""
        ...


class HostProcess(Protocol):
    """A process with some workers, as a host started it: it has a `ProcessWorkers`."""

    def set_up(self) -> Call:
        """Builds the workers; the result says where the process is."""
        ...

    def call(self, method: str, *args: Any) -> Call:
        """Calls a method of its `ProcessWorkers`, which may wait until it is set up."""
        ...

    def run(
        self, worker: str, chain: int, payloads: Sequence[Payload], shared: Sequence[bool]
    ) -> Call:
        """Calls `run`; of the payloads of its reply, those that are `shared` stay there, and a
        reference stands for each."""
        ...

    def pulse(self, worker: str) -> tuple[float, bool, str] | None:
        """See `ProcessWorkers.pulse`; None if it cannot be asked just now. Raises `TimeoutError`
        if it does not answer."""
        ...

    def awaited(self) -> str:
        """What it still needs to start, in words."""
        ...

    def kill(self) -> None:
        """Ends it at once."""
        ...


class Host(Protocol):
    """Starts processes, and makes references that stand for values in all of them."""

    def start(self, name: str, again: bool) -> HostProcess:
        """Starts a process, `again` if one of that name is gone; does not wait for it."""
        ...

    def share(self, values: Values) -> Payload:
        """Packed values, put where every process finds them."""
        ...

    def fetch(self, payload: Payload) -> Values:
        """The packed values that a payload stands for."""
        ...


class Supervised:
    """A process of a host, started again when it is gone."""

    def __init__(
        self, host: Host, name: str, patience: float, stopping: threading.Event, optional: bool
    ) -> None:
        """`optional`: whether a run begins, and goes on, without it."""
        self.name, self.patience, self.optional = name, patience, optional
        self.stopping = stopping
        self._host = host
        self._lock = threading.Lock()
        self._where = "no node yet"
        self.process: HostProcess | None = host.start(name, again=False)
        self._ready = self.process.set_up()

    def started(self) -> tuple[HostProcess, Call]:
        """(the process, what it answers once it is set up); started anew if it was gone."""
        with self._lock:
            if self.process is None:
                self.process = self._host.start(self.name, again=True)
                self._ready = self.process.set_up()
            return self.process, self._ready

    def wait_until_there(
        self, process: HostProcess, ready: Call, tell: Callable[[str], None]
    ) -> None:
        """Waits until it has a place and answers."""
        began, told = time.monotonic(), False
        while True:
            with contextlib.suppress(TimeoutError):
                self._where = self._get(process, ready, LOOK_SECONDS)
                return
            if self.stopping.is_set():
                raise Closed("stopping")
            waited = time.monotonic() - began
            text = f"{self.name} has waited {waited:.0f} s for {process.awaited()}."
            if waited > max(PLACE_SECONDS, COMPILE_SECONDS) and not self.optional:
                raise UserError(text)
            if waited > self.patience and not told:
                told = True
                tell(text)

    def wait(self, process: HostProcess, call: Call, worker: str, beat: Callable[[], None]) -> Any:
        """Waits for a call, and looks after the process meanwhile."""
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
        """Whether a worker gets on; a process whose worker does not is ended. Returns when it last
        did."""
        try:
            pulse = process.pulse(worker)
        except TimeoutError:
            pulse = time.monotonic() - last, False, "It does not answer."
        except WorkerLost:
            return last  # the call itself tells
        if pulse is None:
            return last
        quiet, warm, complaint = pulse
        limit = self.patience if warm else max(self.patience, COMPILE_SECONDS)
        if quiet > limit:
            self.kill(process)
            raise WorkerLost(f"{self.name} on {self._where} hangs, and is ended: {complaint}")
        if quiet < 2 * LOOK_SECONDS:
            beat()
        return time.monotonic() - min(quiet, time.monotonic() - last)

    def _get(self, process: HostProcess, call: Call, limit: float) -> Any:
        try:
            return call.get(limit)
        except WorkerLost as error:
            self.kill(process)
            raise WorkerLost(f"{self.name} on {self._where} is gone ({error}).") from error

    def kill(self, process: HostProcess | None) -> None:
        """Ends it; one that has taken its place meanwhile is left alone."""
        with self._lock:
            if self.process is process:
                self.process = None
        if process is not None:
            with contextlib.suppress(Exception):
                process.kill()


class SupervisedWorker:
    """A worker in such a process."""

    def __init__(self, within: Supervised, worker: str, tell: Callable[[str], None]) -> None:
        self._within, self._worker, self._tell = within, worker, tell
        self._process: HostProcess | None = None

    def begin(self, held: Values, keys: Any) -> Callable[[], Values]:
        """Sets what the worker holds, once the process is there."""
        within, worker = self._within, self._worker
        process, ready = within.started()
        packed = None if keys is None else pack(keys)
        call = process.call("begin", worker, pack_values(held), packed)

        def begun() -> Values:
            within.wait_until_there(process, ready, self._tell)
            made = within.wait(process, call, worker, lambda: None)
            self._process = process
            return unpack_values(made)

        return begun

    def held(self) -> Values:
        """What the worker holds by now."""
        process = self._there()
        call = process.call("held", self._worker)
        return unpack_values(self._within.wait(process, call, self._worker, lambda: None))

    def _there(self) -> HostProcess:
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
        """One call; references go as they are."""
        process = self._there()
        call = process.run(self._worker, chain, payloads, shared)
        return self._within.wait(process, call, self._worker, beat)


class Processes:
    """The processes of a run that are not this one, on a host."""

    def __init__(
        self,
        host: Host,
        groups: Mapping[str, Collection[str]],
        patience: float,
        tell: Callable[[str], None],
        optional: Collection[str] = (),
    ) -> None:
        """Starts them at once: they come up while this one does. `groups` are the workers of each,
        by its name; a run begins, and goes on, without those that are `optional`."""
        self._host, self._tell = host, tell
        self._stopping = threading.Event()
        self._groups = dict(groups)
        self._supervised = {
            name: Supervised(host, name, patience, self._stopping, name in optional)
            for name in groups
        }

    def share(self, values: Values) -> Payload:
        """One reference for all processes."""
        return self._host.share(pack_values(values))

    def fetch(self, payload: Payload) -> Values:
        """The values, as numpy or random keys."""
        return unpack_values(self._host.fetch(payload))

    def worker(self, name: str) -> RemoteWorker:
        """A worker of one of them."""
        group = next(group for group, workers in self._groups.items() if name in workers)
        return SupervisedWorker(self._supervised[group], name, self._tell)

    def stop(self) -> None:
        """Nobody waits for another process any more."""
        self._stopping.set()

    def close(self) -> None:
        """Ends every process, all at a time."""
        self._stopping.set()
        running = [s.process for s in self._supervised.values() if s.process is not None]
        calls = [process.call("close") for process in running]
        deadline = time.monotonic() + CLOSE_SECONDS
        for call in calls:
            with contextlib.suppress(Exception):
                call.get(max(0.0, deadline - time.monotonic()))
        for supervised in self._supervised.values():
            supervised.kill(supervised.process)


def in_parts(reply: Reply, shared: Sequence[bool]) -> tuple[Reply, list[Payload]]:
    """(a reply without the payloads that are shared, those)."""
    pairs = list(zip(reply.payloads, shared, strict=True))
    kept = [None if is_shared else payload for payload, is_shared in pairs]
    return replace(reply, payloads=kept), [p for p, is_shared in pairs if is_shared]


def whole(reply: Reply, shared: Sequence[bool], references: Sequence[Payload]) -> Reply:
    """A reply with references where payloads are shared."""
    left = iter(references)
    pairs = zip(reply.payloads, shared, strict=True)
    return replace(
        reply, payloads=[next(left) if is_shared else payload for payload, is_shared in pairs]
    )
