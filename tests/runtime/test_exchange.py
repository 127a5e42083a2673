"""The link between a learner and its actors: who waits for what, and how old anything gets."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dovetail.runtime.exchange import Closed, Exchange, Parcel, parts_of
from dovetail.runtime.report import Part
from dovetail.runtime.watch import Watch

SECONDS = 20.0
"""After so long a test gives up."""


class Waiting:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.watch = Watch("test")
        self.result: Any = None
        self.error: Exception | None = None
        self._call, self._arguments = call, arguments
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call(*self._arguments, self.watch)
        except Exception as error:
            self.error = error

    @property
    def waits(self) -> bool:
        """Whether it has come to a halt inside the call, rather than returned."""
        until(lambda: not self._thread.is_alive() or (self.watch.waits and self.watch.awaited))
        return self._thread.is_alive()

    def returned(self) -> Any:
        """What the call gave; raises what it raised."""
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), f"still waiting for {self.watch.awaited}"
        if self.error is not None:
            raise self.error
        return self.result


def until(ready: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def parcel(copy: int, turn: int, version: int, log: list[str] | None = None) -> Parcel:
    releases = [] if log is None else [lambda: log.append(f"{copy}/{turn}")]
    return Parcel(copy, turn, version, {0: f"{copy}/{turn}"}, releases=releases)


def names(parcels: list[Parcel]) -> list[str]:
    return [parcel.values[0] for parcel in parcels]


IDLE = Watch("test")
"""For calls that must not wait: it would never be woken."""


# Ordered.


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("first", [0, 5])
def test_an_unroll_is_made_by_weights_of_exactly_that_lag(first: int, staleness: int) -> None:
    exchange = Exchange(1, 1, staleness, ordered=True)
    exchange.begin_at(first)
    for turn in range(first, first + 6):
        exchange.put_weights(turn, {0: f"weights {turn}"})
        version, weights = exchange.take_weights(turn, IDLE)
        assert version == max(first, turn - staleness)
        assert weights == {0: f"weights {version}"}
        exchange.put(parcel(0, turn, version), IDLE)
        (taken,) = exchange.take(turn, IDLE)
        assert parts_of([taken], turn) == [Part(0, turn, min(turn - first, staleness))]


def test_an_actor_waits_for_the_version_of_its_turn_even_if_another_is_there() -> None:
    exchange = Exchange(1, 1, 1, ordered=True)
    exchange.put_weights(0, {0: "first"})
    assert exchange.take_weights(0, IDLE) == exchange.take_weights(1, IDLE) == (0, {0: "first"})
    ahead = Waiting(exchange.take_weights, 2)
    assert ahead.waits
    exchange.put_weights(1, {0: "second"})
    assert ahead.returned() == (1, {0: "second"})


def test_an_update_takes_one_unroll_of_every_actor_in_their_order() -> None:
    exchange = Exchange(3, 3, 1, ordered=True)
    for sent in (parcel(2, 0, 0), parcel(0, 0, 0), parcel(0, 1, 0), parcel(2, 1, 0)):
        exchange.put(sent, IDLE)
    learner = Waiting(exchange.take, 0)
    assert learner.waits  # for actor 1
    exchange.put(parcel(1, 0, 0), IDLE)
    assert names(learner.returned()) == ["0/0", "1/0", "2/0"]
    exchange.put(parcel(1, 1, 0), IDLE)
    assert names(exchange.take(1, IDLE)) == ["0/1", "1/1", "2/1"]


@pytest.mark.parametrize("staleness", [0, 2])
def test_an_actor_cannot_run_further_ahead_than_the_bound(staleness: int) -> None:
    exchange = Exchange(1, 1, staleness, ordered=True)
    for turn in range(staleness + 1):
        exchange.put(parcel(0, turn, 0), IDLE)
    late = Waiting(exchange.put, parcel(0, staleness + 1, 0))
    assert late.waits
    assert names(exchange.take(0, IDLE)) == ["0/0"]
    late.returned()


def test_weights_that_nobody_can_ask_for_any_more_are_let_go() -> None:
    for staleness in (0, 2):
        exchange = Exchange(1, 1, staleness, ordered=True)
        for version in range(20):
            exchange.put_weights(version, {})
        assert sorted(exchange._weights) == list(range(19 - staleness, 20))


# Unordered.


def test_an_unroll_is_made_by_the_latest_weights() -> None:
    exchange = Exchange(2, 1, 3, ordered=False)
    actor = Waiting(exchange.take_weights, 0)
    assert actor.waits  # there are none yet
    exchange.put_weights(0, {0: "first"})
    assert actor.returned() == (0, {0: "first"})
    exchange.put_weights(1, {0: "second"})
    assert exchange.take_weights(1, IDLE) == (1, {0: "second"})
    assert exchange.take_weights(0, IDLE) == (1, {0: "second"})  # whatever its own count


def test_an_update_takes_what_has_arrived_the_oldest_first() -> None:
    exchange = Exchange(3, 2, 5, ordered=False)
    exchange.put(parcel(2, 0, 1), IDLE)
    learner = Waiting(exchange.take, 2)
    assert learner.waits
    exchange.put(parcel(2, 1, 2), IDLE)
    assert names(learner.returned()) == ["2/0", "2/1"]  # of one actor, the others being slow
    for sent in (parcel(0, 1, 2), parcel(1, 0, 0), parcel(1, 1, 2)):
        exchange.put(sent, IDLE)
    assert names(exchange.take(3, IDLE)) == ["1/0", "0/1"]


@pytest.mark.parametrize(("joined", "staleness"), [(1, 0), (1, 4), (2, 1), (3, 2)])
def test_no_more_unrolls_are_begun_than_can_be_learned_from_in_time(
    joined: int, staleness: int
) -> None:
    exchange = Exchange(4, joined, staleness, ordered=False)
    exchange.put_weights(0, {})
    for _ in range(joined * (staleness + 1)):
        exchange.take_weights(0, IDLE)
    assert Waiting(exchange.take_weights, 0).waits


def test_a_waiting_actor_begins_once_an_update_is_done() -> None:
    exchange = Exchange(2, 2, 0, ordered=False)
    exchange.put_weights(0, {})
    for copy in range(2):
        exchange.take_weights(0, IDLE)
        exchange.put(parcel(copy, 0, 0), IDLE)
    exchange.take(0, IDLE)
    actor = Waiting(exchange.take_weights, 1)
    assert actor.waits  # these two are being learned from
    exchange.put_weights(1, {0: "second"})
    assert actor.returned() == (1, {0: "second"})


def test_a_waiting_actor_begins_once_another_has_given_up() -> None:
    exchange = Exchange(2, 1, 0, ordered=False)
    exchange.put_weights(0, {})
    exchange.take_weights(0, IDLE)
    actor = Waiting(exchange.take_weights, 0)
    assert actor.waits
    exchange.abandon()
    assert actor.returned() == (0, {})


def test_what_comes_too_late_is_dropped_counted_and_made_up_for() -> None:
    exchange, log = Exchange(2, 1, 1, ordered=False), list[str]()
    exchange.put_weights(0, {})
    exchange.take_weights(0, IDLE)  # by a slow actor
    for turn in range(3):
        exchange.take_weights(turn, IDLE)
        exchange.put(parcel(1, turn, turn, log), IDLE)
        assert names(exchange.take(turn, IDLE)) == [f"1/{turn}"]
        exchange.put_weights(turn + 1, {})
    exchange.put(parcel(0, 0, 0, log), IDLE)
    learner = Waiting(exchange.take, 3)
    assert learner.waits
    assert exchange.dropped == 1
    assert log == ["0/0"]  # its arrays may be written again, nobody else's were let go here
    exchange.put(parcel(0, 1, 2), IDLE)  # one version old: just in time
    assert names(learner.returned()) == ["0/1"]


def test_dropping_gives_an_actor_leave_to_begin() -> None:
    exchange = Exchange(3, 1, 1, ordered=False)
    exchange.put_weights(0, {})
    for _ in range(2):
        exchange.take_weights(0, IDLE)
    exchange.put_weights(7, {})
    exchange.put(parcel(0, 0, 0), IDLE)
    actor = Waiting(exchange.take_weights, 0)
    assert actor.waits
    learner = Waiting(exchange.take, 7)
    assert actor.returned() == (7, {})
    assert exchange.dropped == 1
    exchange.put(parcel(2, 0, 7), IDLE)
    assert names(learner.returned()) == ["2/0"]


# Both.


def test_closing_wakes_whoever_waits() -> None:
    ordered, unordered = Exchange(1, 1, 0, ordered=True), Exchange(1, 1, 0, ordered=False)
    ordered.put(parcel(0, 0, 0), IDLE)
    waiting = [
        Waiting(ordered.take_weights, 0),
        Waiting(ordered.put, parcel(0, 1, 0)),
        Waiting(unordered.take_weights, 0),
        Waiting(unordered.take, 0),
    ]
    assert all(call.waits for call in waiting)
    for exchange in (ordered, unordered):
        exchange.close()
        exchange.close()
    for call in waiting:
        with pytest.raises(Closed):
            call.returned()
    with pytest.raises(Closed):
        unordered.take(0, IDLE)


class Traffic:
    """A learner and actors that take random times over everything; counts what happens."""

    def __init__(self, seed: int, actors: int, joined: int, staleness: int, ordered: bool) -> None:
        self.exchange = Exchange(actors, joined, staleness, ordered)
        self.ages: list[int] = []
        self.learned: list[str] = []
        self.begun = self.most = 0
        self._outstanding = 0
        self._seed, self._actors, self._ordered = seed, actors, ordered
        self._counting = threading.Lock()
        self._threads = [
            threading.Thread(target=self._act, args=(copy,), daemon=True) for copy in range(actors)
        ]

    def run(self, updates: int) -> None:
        chance, watch = random.Random(self._seed), Watch("learner")
        for thread in self._threads:
            thread.start()
        for turn in range(updates):
            self.exchange.put_weights(turn, {0: turn})
            parcels = self.exchange.take(turn, watch)
            self.ages += [part.staleness for part in parts_of(parcels, turn)]
            self.learned += names(parcels)
            self._count(-len(parcels))
            self._pause(chance, 0.002)
        self.exchange.close()
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive()

    def _act(self, copy: int) -> None:
        chance, watch, turn = random.Random(100 * self._seed + copy), Watch(f"actor-{copy}"), 0
        slow = 0.02 if copy == 0 else 0.002
        try:
            while True:
                version, weights = self.exchange.take_weights(turn, watch)
                assert weights == {0: version}
                self._count(1)
                self._pause(chance, slow)
                if not self._ordered and chance.random() < 0.1:
                    self._count(-1)
                    self.exchange.abandon()
                else:
                    self.exchange.put(parcel(copy, turn, version), watch)
                turn += 1
        except Closed:
            pass

    def _count(self, change: int) -> None:
        with self._counting:
            self.begun += max(change, 0)
            self._outstanding += change
            self.most = max(self.most, self._outstanding - self.exchange.dropped)

    @staticmethod
    def _pause(chance: random.Random, longest: float) -> None:
        if chance.random() < 0.7:
            time.sleep(longest * chance.random())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("actors", "joined", "staleness"), [(1, 1, 1), (3, 3, 1), (4, 1, 2), (4, 4, 3), (4, 1, 8)]
)
def test_whatever_the_timing_nothing_is_too_old(
    seed: int, actors: int, joined: int, staleness: int
) -> None:
    traffic = Traffic(seed, actors, joined, staleness, ordered=False)
    traffic.run(updates=60)
    assert min(traffic.ages) >= 0 and max(traffic.ages) <= staleness
    assert len(traffic.learned) == 60 * joined == len(set(traffic.learned))
    assert traffic.most <= joined * (staleness + 1)
    assert traffic.begun >= 60 * joined + traffic.exchange.dropped


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("actors", "staleness"), [(1, 0), (3, 0), (3, 2)])
def test_whatever_the_timing_an_ordered_link_repeats(
    seed: int, actors: int, staleness: int
) -> None:
    traffic = Traffic(seed, actors, actors, staleness, ordered=True)
    traffic.run(updates=30)
    assert traffic.learned == [f"{copy}/{turn}" for turn in range(30) for copy in range(actors)]
    assert traffic.ages == [min(turn, staleness) for turn in range(30) for _ in range(actors)]
    assert traffic.exchange.dropped == 0
