"""Requests to a worker that keeps a replay, and its answers."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dovetail.runtime.errands import Errands
from dovetail.runtime.exchange import Closed, Exchange, Parcel
from dovetail.runtime.watch import Watch
from dovetail.runtime.worker import Ask, PutAnswer, TakeAnswers, TakeErrand, Turn, Worker

NODE = "replay"


def worker(name: str = "learner", errands: Errands | None = None) -> Worker:
    return Worker(name, 0, [], errands=errands)


def test_a_request_stays_until_the_turn_is_over() -> None:
    errands = Errands()
    errands.ask(NODE, 0, {1: "draws"})
    assert errands.asked(NODE, 0, Watch("replay"))[0] == {1: "draws"}
    assert errands.asked(NODE, 0, Watch("replay"))[0] == {1: "draws"}  # as after a failure
    errands.finish(0)
    late = InThread(lambda: errands.asked(NODE, 0, Watch("replay")))
    assert late.waits
    errands.close()
    assert isinstance(late.outcome(), Closed)


def test_who_waits_says_what_for() -> None:
    errands, watch = Errands(), Watch("learner")
    waiting = InThread(lambda: errands.answered(NODE, 0, watch))
    assert waiting.waits
    assert watch.waits and watch.awaited == "the answer of replay"
    errands.answer(NODE, 0, {2: "sample"})
    assert waiting.outcome() == {2: "sample"}
    assert not watch.waits and watch.waited > 0


def test_a_state_is_taken_once_all_is_done() -> None:
    errands = Errands()
    errands.begin_at(5)
    assert errands.wait_until(5, 0.0)
    assert not errands.wait_until(6, 0.01)
    errands.finish(5)
    assert errands.wait_until(6, 0.0)


def test_each_shard_gets_the_pieces_of_its_actors_and_its_part() -> None:
    links, released = (Errands(), Errands()), list[str]()
    unread: dict[int, list[Callable[[], None]]] = {}
    turn = Turn(3)
    turn.parcels = [Parcel(i, 3, 3, {}, releases=[lambda: released.append("x")]) for i in range(4)]
    values: dict[int, Any] = {10: ["a", "b", "c", "d"], 11: np.array([[1, 2, 3, 4]])}
    Ask(links, NODE, (10,), (11,), unread, "insert+draw")(worker(), values, turn)
    found = [link.asked(NODE, 3, Watch("replay"))[0] for link in links]
    assert [request[10] for request in found] == [["a", "b"], ["c", "d"]]
    assert [request[11].tolist() for request in found] == [[[1, 2]], [[3, 4]]]
    assert all(not parcel.releases for parcel in turn.parcels)  # they are still read
    for link, answer in zip(links, ("left", "right"), strict=True):
        keeper = worker("keeper", link)
        TakeErrand(link, NODE)(keeper, {}, Turn(3))
        PutAnswer(link, NODE, (12,))(keeper, {12: answer}, Turn(3))
    TakeAnswers(links, NODE, (12,), 0, unread, "sample")(worker(), values, turn)
    assert values[12] == ["left", "right"]
    assert len(turn.releases) == 4 and not unread and not released


@pytest.mark.parametrize(("ahead", "taken"), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2])])
def test_answers_ahead(ahead: int, taken: list[int]) -> None:
    """The first answer is taken again until there is one for each turn."""
    link, unread, released = Errands(), dict[int, list[Callable[[], None]]](), list[int]()
    learner, found = worker(), list[int]()
    for number in range(4):
        turn = Turn(number)
        turn.parcels = [Parcel(0, number, 0, {}, releases=[lambda n=number: released.append(n)])]
        Ask((link,), NODE, (), (), unread, "draw")(learner, {}, turn)
        link.answer(NODE, number, {12: number})
        values: dict[int, Any] = {}
        TakeAnswers((link,), NODE, (12,), ahead, unread, "sample")(learner, values, turn)
        found.append(values[12])
        for release in turn.releases:
            release()
    assert found == taken
    assert released == list(range(4 - ahead))  # what was read, and nothing else


def test_every_group_of_actors_gives_its_part() -> None:
    """A group that is slow is waited for, one that is fast cannot take its place."""
    exchange, idle = Exchange(4, 4, 1, ordered=False, groups=2), Watch("learner")
    exchange.put_weights(0, {})
    for copy in (0, 1, 0, 1):  # two updates' worth
        exchange.take_weights(0, idle, copy)
        exchange.put(Parcel(copy, 0, 0, {}), idle)
    ahead = InThread(lambda: exchange.take_weights(0, Watch("actor-0"), 0))
    taking = InThread(lambda: exchange.take(0, Watch("learner")))
    assert ahead.waits and taking.waits
    for copy in (3, 2):
        exchange.take_weights(0, idle, copy)
        exchange.put(Parcel(copy, 0, 0, {}), idle)
    assert [parcel.copy for parcel in taking.outcome()] == [0, 1, 3, 2]
    exchange.put_weights(1, {})
    assert ahead.outcome() == (1, {})


class InThread:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._found: Any = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._call()
        except Closed as error:
            self._found = error

    @property
    def waits(self) -> bool:
        self._thread.join(0.1)
        return self._thread.is_alive()

    def outcome(self) -> Any:
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self._found
