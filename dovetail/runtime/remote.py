"""Workers in other processes: the interface that a host provides to the runtime.

A remote worker has a thread in this process that takes from and puts to its channels like any
other. In between, it calls the other process to run a chain of the worker's programs. Values sent
from one remote process to another bypass this one: the host provides a reference to them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import jax

from dovetail.errors import UserError
from dovetail.runtime.arrays import Values
from dovetail.telemetry.spans import LINK, Span, Track, clock_ahead, on_clock

Payload = object
"""The values of a message (`wire.SentValues`), or a host's reference to them. Only a host reads it;
the runtime passes it on."""


class WorkerLost(UserError):
    """The process of a worker, or its node, has died; it can be replaced."""


@dataclass(frozen=True)
class Reply:
    """The result of a chain of programs."""

    payloads: Sequence[Payload]
    """One for each channel that is put to after the chain."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds spent, by fragment."""
    spans: Sequence[Span] = ()
    """Its spans, on the clock of the remote process."""
    clock: tuple[float, float] = (0.0, 0.0)
    """Start and end on that clock."""


class RemoteWorker(Protocol):
    """A worker in another process."""

    def begin(self, held: Values, keys: jax.Array | None) -> Callable[[], Values]:
        """Starts the process if needed and sets the worker's state, without waiting.

        Host environments begin new episodes with `keys`, if given. The returned function waits for
        the worker and returns its state.
        """
        ...

    def held(self) -> Values:
        """The current state of the worker."""
        ...

    def run(
        self,
        chain: int,
        payloads: Sequence[Payload],
        shared: Sequence[bool],
        beat: Callable[[], None],
    ) -> Reply:
        """Runs a chain of its programs on these inputs; calls `beat` on signs of life.

        `shared` says for each following channel whether to return only a reference.
        """
        ...


class RemoteWorkers(Protocol):
    """Access to the workers of other processes."""

    def share(self, values: Values) -> Payload:
        """Makes values available to every process and returns a reference to them."""
        ...

    def fetch(self, payload: Payload) -> Values:
        """The values of a payload or reference."""
        ...

    def worker(self, name: str) -> RemoteWorker:
        """A worker of another process."""
        ...

    def hurry(self) -> None:
        """Ends processes that hang soon, because a stop is requested; a signal handler may call
        it."""
        ...

    def stop(self) -> None:
        """Ends all waits for other processes, because the run is ending."""
        ...

    def close(self) -> None:
        """Stops every process; safe to call twice."""
        ...


class RemoteChain:
    """A chain of a worker's programs, run in another process."""

    def __init__(self, name: str, remote: RemoteWorker, chain: int, shared: list[bool]) -> None:
        self.name = name
        self.seconds: dict[str, float] = {}
        self.calls = 0
        self.inside = 0.0
        """Seconds that the process computed, without the time of messages."""
        self._remote, self._chain, self._shared = remote, chain, shared

    def run(
        self, payloads: Sequence[Payload], beat: Callable[[], None], track: Track
    ) -> list[Payload]:
        """Runs the chain and returns one payload for each following channel."""
        called = time.perf_counter()
        reply = self._remote.run(self._chain, payloads, self._shared, beat)
        answered = time.perf_counter()
        begun, done = reply.clock
        track.extend(on_clock(reply.spans, clock_ahead(called, answered, begun, done)))
        # The round trip without the remote work is the cost of the message.
        spent = answered - called - (done - begun)
        track.add(LINK, "message", called, spent, items=1)
        self.calls += 1
        for name, seconds in reply.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self.inside += seconds
        return list(reply.payloads)
