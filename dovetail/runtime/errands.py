"""The link between a learner and a worker that keeps a part of the replay: requests and answers.

Both count their turns, so a request is known by its node and its turn. It stays until the turn is
over: a worker that failed is asked again. An answer stays until one of a later turn is taken, so a
learner that is answered ahead may begin with the first one twice.
"""

import threading
import time
from collections.abc import Callable

from dovetail.runtime.exchange import Closed
from dovetail.runtime.programs import Values
from dovetail.runtime.watch import Watch

Errand = tuple[str, int]
"""A node, and the turn."""


class Errands:
    """One learner, one worker that does things for it."""

    def __init__(self) -> None:
        self.first = 0
        """The number of the first turn."""
        self._asked: dict[Errand, Values] = {}
        self._answered: dict[Errand, Values] = {}
        self._sent: dict[Errand, float] = {}
        self._over = 0
        self._changed = threading.Condition()
        self._closed = False

    def begin_at(self, turn: int) -> None:
        """The first turn; before anything is asked."""
        self.first = self._over = turn

    def ask(self, node: str, turn: int, values: Values) -> None:
        """Asks for a node to be run on these values."""
        with self._changed:
            self._asked[node, turn] = values
            self._sent[node, turn] = time.perf_counter()
            self._changed.notify_all()

    def asked(self, node: str, turn: int, watch: Watch) -> tuple[Values, float]:
        """(what a node is to be run on, when that was sent); waits for it."""
        with self._changed:
            self._wait(lambda: (node, turn) in self._asked, watch, "the learner to ask")
            return self._asked[node, turn], self._sent[node, turn]

    def answer(self, node: str, turn: int, values: Values) -> None:
        """What the node made."""
        with self._changed:
            self._answered[node, turn] = values
            self._changed.notify_all()

    def answered(self, node: str, turn: int, watch: Watch) -> Values:
        """What the node made; waits for it. Answers before it are forgotten."""
        with self._changed:
            self._wait(lambda: (node, turn) in self._answered, watch, f"the answer of {node}")
            for old in [e for e in self._answered if e[0] == node and e[1] < turn]:
                del self._answered[old]
            return self._answered[node, turn]

    def finish(self, turn: int) -> None:
        """The worker's turn is over, with all that it was asked for."""
        with self._changed:
            for old in [errand for errand in self._asked if errand[1] <= turn]:
                del self._asked[old], self._sent[old]
            self._over = turn + 1
            self._changed.notify_all()

    def wait_until(self, turns: int, limit: float) -> bool:
        """Waits until so many turns are over; False if that takes longer than `limit` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._over >= turns or self._closed, limit)

    def close(self) -> None:
        """Wakes everyone who waits; they get `Closed`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], watch: Watch, what: str) -> None:
        if ready():
            return
        watch.waiting(what)
        try:
            self._changed.wait_for(lambda: ready() or self._closed)
        finally:
            watch.waited_until_now()
        if self._closed:
            raise Closed(what)
