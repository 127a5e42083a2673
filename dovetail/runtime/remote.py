"""Workers in other processes: what the runtime asks of a host, whoever carries it there.

A worker elsewhere has a thread here, which takes from its channels and puts to them as any other;
between the two, it asks the other process to run a chain of the worker's programs. What goes from
one such process to another does not come here: a host gives a reference that stands for it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dovetail.errors import UserError
from dovetail.runtime.packing import Values
from dovetail.telemetry.spans import LINK, Span, Track, clock_ahead, on_clock

Payload = Any
"""Packed values by number, or a host's reference that stands for them."""


class WorkerLost(UserError):
    """The process of a worker, or its node, is gone; another can take its place."""


@dataclass(frozen=True)
class Reply:
    """What a chain of programs made."""

    payloads: Sequence[Payload]
    """For each channel that is put to after the chain."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Spent on it, by fragment."""
    spans: Sequence[Span] = ()
    """What was done, on the process's own clock."""
    clock: tuple[float, float] = (0.0, 0.0)
    """That clock when it began and when it was done."""


class RemoteWorker(Protocol):
    """A worker in another process."""

    def begin(self, held: Values, keys: Any) -> Callable[[], Values]:
        """Starts the process if it is not there, and sets what the worker holds. Host environments
        begin new episodes by `keys`, if given. The call that is returned waits for what the worker
        holds then."""
        ...

    def held(self) -> Values:
        """What the worker holds by now."""
        ...

    def run(
        self,
        chain: int,
        payloads: Sequence[Payload],
        shared: Sequence[bool],
        beat: Callable[[], None],
    ) -> Reply:
        """Runs a chain of its programs on what was taken; calls `beat` on signs of life. For each
        channel that follows, `shared` says whether only a reference is wanted."""
        ...


class RemoteWorkers(Protocol):
    """Reaches the workers of other processes."""

    def share(self, values: Values) -> Payload:
        """Puts values where every process finds them; what is returned stands for them."""
        ...

    def fetch(self, payload: Payload) -> Values:
        """The values that a payload holds or stands for."""
        ...

    def worker(self, name: str) -> RemoteWorker:
        """A worker that is not in this process."""
        ...

    def stop(self) -> None:
        """The run ends: nobody waits for another process any more."""
        ...

    def close(self) -> None:
        """Ends every process; safe to call twice."""
        ...


class RemoteChain:
    """A chain of a worker's programs, run in its process."""

    def __init__(self, name: str, remote: RemoteWorker, chain: int, shared: list[bool]) -> None:
        self.name = name
        self.seconds: dict[str, float] = {}
        self.calls = 0
        self.inside = 0.0
        """Seconds that the process was at work, of all that it was waited for."""
        self._remote, self._chain, self._shared = remote, chain, shared

    def run(
        self, payloads: Sequence[Payload], beat: Callable[[], None], track: Track
    ) -> list[Payload]:
        """What goes to the channels that follow."""
        called = time.perf_counter()
        reply = self._remote.run(self._chain, payloads, self._shared, beat)
        answered = time.perf_counter()
        begun, done = reply.clock
        track.extend(on_clock(reply.spans, clock_ahead(called, answered, begun, done)))
        spent = answered - called - (done - begun)
        track.add(LINK, "message", called, spent, items=1)
        self.calls += 1
        for name, seconds in reply.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self.inside += seconds
        return list(reply.payloads)
