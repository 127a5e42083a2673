"""Workers in other processes: what a schedule needs of them, whoever carries it there.

Here such a worker takes from its links and puts to them as any other; between the two, what its
programs would do is asked of its outpost. Which weights it may begin with, and whether what it made
is still wanted, is thus decided in one place.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dovetail.errors import UserError
from dovetail.telemetry.spans import LINK, Span, Track, clock_ahead, on_clock

Values = dict[int, Any]


class OutpostLost(UserError):
    """The process of a worker, or its node, is gone; another can take its place."""


@dataclass(frozen=True)
class Reply:
    """What an outpost made."""

    values: Values
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Spent on it, by fragment."""
    spans: Sequence[Span] = ()
    """What it did, on its own clock."""
    clock: tuple[float, float] = (0.0, 0.0)
    """Its clock when it began and when it was done."""


class Outpost(Protocol):
    """A worker in another process."""

    def begin(self, leaves: list[Any], keys: Any) -> Callable[[], list[Any]]:
        """Starts the process if it is not there, and sets the actor's state: `leaves`. Host
        environments begin new episodes by `keys`. The call that is returned waits for the actor's
        state as it is then."""
        ...

    def hold(self, leaves: list[Any]) -> None:
        """Starts the process if it is not there, and gives it its part of the replay: `leaves`."""
        ...

    def held(self) -> list[Any]:
        """Its part of the replay as it is by now."""
        ...

    def run(self, stretch: int, given: Sequence[Any], beat: Callable[[], None]) -> Reply:
        """Runs a stretch of its programs with what was taken; calls `beat` on signs of life."""
        ...


class Abroad(Protocol):
    """Reaches the workers of other stations."""

    def share(self, values: Values) -> Any:
        """Puts values where every outpost finds them; what is returned stands for them."""
        ...

    def outpost(self, worker: str) -> Outpost:
        """The process of a worker."""
        ...

    def stop(self) -> None:
        """The run ends: nobody waits for an outpost any more."""
        ...


class RemoteProgram:
    """A stretch of a worker's programs, run by its outpost."""

    def __init__(self, name: str, outpost: Outpost, stretch: int, taken: Sequence[int]) -> None:
        """`taken`: where the values of the links that it reads from lie."""
        self.name = name
        self.seconds: dict[str, float] = {}
        self.calls = 0
        self.inside = 0.0
        """Seconds that the outpost was at work, of all that it was waited for."""
        self._outpost, self._stretch, self._taken = outpost, stretch, tuple(taken)
        self._beat: Callable[[], None] = lambda: None
        self._track = Track(name)

    def heard_by(self, beat: Callable[[], None], track: Track) -> None:
        """Who is to be called on signs of life, and where spans are noted."""
        self._beat, self._track = beat, track

    def run(self, values: Values) -> None:
        """Takes what was shared from `values`, and puts what the outpost made there."""
        given = [values.pop(number) for number in self._taken]
        called = time.perf_counter()
        reply = self._outpost.run(self._stretch, given, self._beat)
        answered = time.perf_counter()
        values.update(reply.values)
        begun, done = reply.clock
        self._track.extend(on_clock(reply.spans, clock_ahead(called, answered, begun, done)))
        spent = answered - called - (done - begun)
        self._track.add(LINK, "message", called, spent, items=1)
        self.calls += 1
        for name, seconds in reply.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self.inside += seconds
