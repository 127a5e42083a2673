"""Channels in lockstep: who takes which message, who waits for what, and when buffers are free."""

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
from waiting import SECONDS, Waiting

from dovetail.boundaries import How
from dovetail.runtime.channel import ENOUGH, ChannelEdge, Closed, Lease, Lockstep, Message, Turn
from dovetail.runtime.heartbeat import Watch
from dovetail.runtime.worker import Put, RunningWorker, RunProgram, Take

IDLE = Watch("test")
"""For calls that must not wait: it would never be woken."""


def edge(senders: int = 1, takers: int = 1, how: How = How.JOIN, *numbers: int) -> ChannelEdge:
    return ChannelEdge("gather", numbers or (0,), how, senders, takers)


def message(copy: int, turn: int, version: int = 0, lease: Lease | None = None) -> Message:
    values: Any = {0: f"{copy}/{turn}"}  # a name stands for an array
    return Message(copy, turn, version, values, lease=lease)


def put(channel: Lockstep, copy: int, turn: int, version: int = 0, watch: Watch = IDLE) -> None:
    channel.put(Turn(turn, version), message(copy, turn, version), watch)


def names(messages: list[Message]) -> list[str]:
    return [str(sent.values[0]) for sent in messages if sent.values is not None]


def take(channel: Lockstep, turn: int, taker: int = 0, watch: Watch = IDLE) -> list[str]:
    return names(channel.take(Turn(turn, turn), taker, watch))


# From some copies to others.


@pytest.mark.parametrize(
    ("how", "senders", "takers", "from_whom", "parts"),
    [
        (How.COPY, 1, 1, [[0]], [(0, 1)]),
        (How.COPY, 3, 2, [[0], [0]], [(0, 1), (0, 1)]),
        (How.COPY, 1, 3, [[0], [0], [0]], [(0, 1)] * 3),
        (How.JOIN, 4, 1, [[0, 1, 2, 3]], [(0, 1)]),
        (How.JOIN, 4, 2, [[0, 1], [2, 3]], [(0, 1), (0, 1)]),
        (How.JOIN, 2, 2, [[0], [1]], [(0, 1), (0, 1)]),
        (How.JOIN, 1, 2, [[0], [0]], [(0, 2), (1, 2)]),
        (How.JOIN, 2, 4, [[0], [0], [1], [1]], [(0, 2), (1, 2), (0, 2), (1, 2)]),
        (How.DIVIDE, 1, 2, [[0], [0]], [(0, 2), (1, 2)]),
        (How.DIVIDE, 2, 2, [[0], [0]], [(0, 2), (1, 2)]),
        (How.DIVIDE, 3, 1, [[0]], [(0, 1)]),
        (How.MEAN, 3, 1, [[0, 1, 2]], [(0, 1)]),
        (How.MEAN, 2, 3, [[0, 1]] * 3, [(0, 1)] * 3),
    ],
)
def test_who_takes_what_of_whom(
    how: How, senders: int, takers: int, from_whom: list[list[int]], parts: list[tuple[int, int]]
) -> None:
    between = edge(senders, takers, how)
    assert [list(between.senders_of(taker)) for taker in range(takers)] == from_whom
    assert [between.part(taker) for taker in range(takers)] == parts
    readers = [sum(sender in found for found in from_whom) for sender in range(senders)]
    assert [between.takers_of(sender) for sender in range(senders)] == readers


@pytest.mark.parametrize("senders", [1, 2, 4])
@pytest.mark.parametrize("takers", [1, 2, 4])
@pytest.mark.parametrize("how", [How.JOIN, How.DIVIDE])
def test_a_batch_arrives_once_and_in_order(how: How, senders: int, takers: int) -> None:
    whole = np.arange(16).reshape(2, 8)
    held = np.split(whole, senders, 1) if how is How.JOIN else [whole] * senders
    between = edge(senders, takers, how, 7)
    arrived: list[Any] = []
    for taker in range(takers):
        sent: list[Any] = [{7: held[copy]} for copy in between.senders_of(taker)]
        found = between.combined(sent, taker)[7]
        arrived += found if isinstance(found, list) else [found]
    np.testing.assert_array_equal(np.concatenate(arrived, 1), whole)


def test_a_program_joins_or_averages_what_several_sent() -> None:
    """They come as a list, of every value; what one sent comes as it is."""
    sent: list[Any] = [{1: "a", 2: "b"}, {1: "c", 2: "d"}]
    assert edge(2, 1, How.MEAN, 1, 2).combined(sent, 0) == {1: ["a", "c"], 2: ["b", "d"]}
    assert edge(1, 1, How.JOIN, 1, 2).combined(sent[:1], 0) == sent[0]


# In step.


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("first", [0, 5])
def test_a_turn_takes_what_is_exactly_that_old(first: int, lag: int) -> None:
    """At the start, when there is nothing so old, it takes the first again."""
    channel = Lockstep(edge(), lag)
    channel.begin_at(first)
    for turn in range(first, first + 6):
        put(channel, 0, turn, version=turn)
        assert take(channel, turn) == [f"0/{max(first, turn - lag)}"]
        channel.finish(turn, 0)


def test_who_takes_waits_for_its_turn_even_if_another_is_there() -> None:
    channel = Lockstep(edge(), lag=1)
    put(channel, 0, 0)
    assert take(channel, 0) == take(channel, 1) == ["0/0"]
    ahead = Waiting(channel.take, Turn(2, 0), 0)
    assert ahead.waits and ahead.watch.awaited == "gather"
    put(channel, 0, 1)
    assert names(ahead.returned()) == ["0/1"]
    assert not ahead.watch.waits and ahead.watch.waited > 0


def test_a_turn_takes_one_message_of_every_sender_in_their_order() -> None:
    channel = Lockstep(edge(3))
    for copy, turn in ((2, 0), (0, 0), (0, 1), (2, 1)):
        put(channel, copy, turn)
    taking = Waiting(channel.take, Turn(0, 0), 0)
    assert taking.waits  # for sender 1
    put(channel, 1, 0)
    assert names(taking.returned()) == ["0/0", "1/0", "2/0"]
    put(channel, 1, 1)
    assert take(channel, 1) == ["0/1", "1/1", "2/1"]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_sender_cannot_run_further_ahead_than_the_depth(depth: int) -> None:
    """It may go on once the slowest of those who take is done."""
    channel = Lockstep(edge(1, 2, How.COPY), depth=depth)
    for turn in range(depth):
        put(channel, 0, turn)
    late = Waiting(lambda watch: put(channel, 0, depth, watch=watch))
    assert late.waits and late.watch.awaited == ENOUGH
    for taker in range(2):
        assert take(channel, 0, taker) == ["0/0"]
    channel.finish(0, 0)
    assert late.waits
    channel.finish(0, 1)
    late.returned()


def test_a_message_stays_until_all_who_take_it_are_done() -> None:
    channel = Lockstep(edge(1, 2, How.COPY))
    put(channel, 0, 0)
    assert take(channel, 0) == take(channel, 0) == ["0/0"]  # as after a failure
    channel.finish(0, 0)
    assert take(channel, 0, taker=1) == ["0/0"]
    channel.finish(0, 1)
    late = Waiting(channel.take, Turn(0, 0), 0)
    assert late.waits
    channel.close()
    with pytest.raises(Closed):
        late.returned()


@pytest.mark.parametrize("lag", [0, 2])
def test_what_nobody_can_ask_for_any_more_is_let_go(lag: int) -> None:
    channel = Lockstep(edge(), lag)
    for turn in range(20):
        put(channel, 0, turn)
        take(channel, turn)
        channel.finish(turn, 0)
    assert sorted(channel._sent) == list(range(20 - lag, 20))


def test_what_a_sender_sends_again_after_a_failure_takes_the_place_of_the_first() -> None:
    channel = Lockstep(edge(2))
    put(channel, 0, 0)
    put(channel, 1, 0)
    again = message(0, 0)
    again.values = {0: np.array("again")}
    channel.put(Turn(0, 0), again, IDLE)
    assert take(channel, 0) == ["again", "1/0"]


def test_closing_wakes_whoever_waits() -> None:
    channel = Lockstep(edge(), depth=1)
    put(channel, 0, 0)
    waiting = [
        Waiting(lambda watch: put(channel, 0, 1, watch=watch)),
        Waiting(channel.take, Turn(3, 0), 0),
        Waiting(channel.take, Turn(4, 0), 0),
    ]
    assert all(call.waits for call in waiting)
    channel.close()
    channel.close()
    for call in waiting:
        with pytest.raises(Closed):
            call.returned()
    with pytest.raises(Closed):
        channel.take(Turn(1, 0), 0, IDLE)


# Workers: what they take and put, and what becomes of it.


class Program:
    """Notes what it is given, and makes what it is told; its buffers are released by name."""

    name = "program"

    def __init__(self, makes: dict[int, Any], released: list[str] | None = None) -> None:
        self.makes, self.released = makes, released
        self.given: list[dict[int, Any]] = []
        self.fails = False

    def run(self, values: Any) -> Any:
        self.given.append(dict(values))
        if self.fails:
            raise RuntimeError("an environment")
        values.update(self.makes)
        released, number = self.released, len(self.given)
        return None if released is None else lambda: released.append(f"unroll {number}")


def worker(name: str, *operations: Any) -> RunningWorker:
    made = RunningWorker(name, {}, [])
    made.schedule = list(operations)
    return made


def test_each_copy_gets_the_pieces_of_its_senders_and_its_part() -> None:
    """Four actors insert into two shards, and a learner divides its draws among them."""
    rows, draws = Lockstep(edge(4, 2, How.JOIN, 10)), Lockstep(edge(1, 2, How.DIVIDE, 11))
    for copy, name in enumerate("abcd"):
        worker(f"actor-{copy}", RunProgram(Program({10: name})), Put(rows, copy)).turn(3)
    worker("learner", RunProgram(Program({11: np.array([[1, 2, 3, 4]])})), Put(draws, 0)).turn(3)
    shards = [Program({}), Program({})]
    for copy, program in enumerate(shards):
        worker(f"replay-{copy}", Take(rows, copy), Take(draws, copy), RunProgram(program)).turn(3)
    assert [program.given[0][10] for program in shards] == [["a", "b"], ["c", "d"]]
    assert [program.given[0][11].tolist() for program in shards] == [[[1, 2]], [[3, 4]]]


def test_buffers_are_released_once_when_the_last_reader_is_done() -> None:
    """An actor's rows are read by a learner, by two shards and by the actor itself."""
    learned, kept = Lockstep(edge(1, 1)), Lockstep(edge(1, 2, How.JOIN, 0))
    released: list[str] = []
    program = Program({0: np.zeros((1, 2))}, released)
    actor = worker("actor", RunProgram(program), Put(learned, 0), Put(kept, 0))
    readers = [
        worker("learner", Take(learned, 0)),
        *(worker(f"replay-{copy}", Take(kept, copy)) for copy in range(2)),
    ]
    turns = [(one, one.turn(0)[1]) for one in (actor, *readers)]
    for one, turn in turns[:-1]:
        one.end(turn)
        assert released == []
    turns[-1][0].end(turns[-1][1])
    assert released == ["unroll 1"]


def test_buffers_that_nobody_else_reads_are_released_with_the_turn() -> None:
    released: list[str] = []
    alone = worker("main", RunProgram(Program({0: 1}, released)))
    alone.end(alone.turn(0)[1])
    assert released == ["unroll 1"]


def test_a_lease_ends_once() -> None:
    log: list[int] = []
    lease = Lease(3, [lambda: log.append(1), lambda: log.append(2)])
    threads = [threading.Thread(target=lease.done) for _ in range(3)]
    for i, thread in enumerate(threads):
        assert (log == []) is (i < 3)
        thread.start()
        thread.join()
    assert log == [1, 2]


@pytest.mark.parametrize(("ahead", "taken"), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2])])
def test_answers_ahead(ahead: int, taken: list[int]) -> None:
    """A table is asked for every turn, and its first answer taken until there is one for each."""
    asked, answers = Lockstep(edge(1, 1, How.DIVIDE, 1)), Lockstep(edge(1, 1, How.JOIN, 2), ahead)
    released: list[str] = []
    found: list[int] = []
    for number in range(4):
        draw = Program({1: number}, released)
        learner = worker("learner", RunProgram(draw), Put(asked, 0), Take(answers, 0))
        table = worker("replay", Take(asked, 0), RunProgram(Program({2: number})), Put(answers, 0))
        learning = Waiting(lambda _, learner=learner, number=number: learner.turn(number))
        table.end(table.turn(number)[1])
        values, turn = learning.returned()
        found.append(values[2])
        assert released == ["unroll 1"] * number
        learner.end(turn)
    assert found == taken and released == ["unroll 1"] * 4


def test_a_turn_that_failed_takes_the_same_again_and_keeps_nothing() -> None:
    weights, program = Lockstep(edge()), Program({})
    program.fails = True
    put(weights, 0, 0, version=4)
    actor = worker("actor", Take(weights, 0, weights=True), RunProgram(program))
    held: Any = {9: "before"}
    actor.held = held
    with pytest.raises(RuntimeError, match="an environment"):
        actor.turn(0)
    assert actor.held == {9: "before"}
    program.fails = False
    _, turn = actor.turn(0)
    assert turn.version == 4
    assert program.given == [{9: "before", 0: "0/0"}] * 2
    actor.end(turn)
    assert Waiting(weights.take, Turn(0, 0), 0).waits  # it is done with it now


def test_a_turn_that_failed_undoes_what_it_began() -> None:
    undone: list[int] = []

    class Admits(Lockstep):
        def take(self, turn: Turn, taker: int, watch: Watch) -> list[Message]:
            turn.undo.append(lambda: undone.append(turn.number))
            return [message(0, 0)]

    program = Program({})
    actor = worker("actor", Take(Admits(edge()), 0), RunProgram(program))
    actor.turn(1)
    program.fails = True
    with pytest.raises(RuntimeError):
        actor.turn(2)
    assert undone == [2]


def test_a_state_is_taken_once_all_is_done() -> None:
    one = worker("replay", RunProgram(Program({})))
    one.begin_at(5)
    assert one.ended(4, 0.0)
    assert not one.ended(5, 0.01)
    _, turn = one.turn(5)
    assert not one.ended(5, 0.0)
    one.end(turn)
    assert one.ended(5, 0.0)


# Whatever the timing.


class Traffic:
    """A learner and actors that take random times over everything."""

    def __init__(self, seed: int, actors: int, staleness: int) -> None:
        self.weights = Lockstep(edge(1, actors, How.COPY), staleness)
        self.unrolls = Lockstep(edge(actors, 1), depth=staleness + 1)
        self.learned: list[str] = []
        self.ages: list[int] = []
        self._seed, self._staleness = seed, staleness
        self._threads = [
            threading.Thread(target=self._act, args=(copy,), daemon=True) for copy in range(actors)
        ]

    def run(self, updates: int) -> None:
        chance, watch = random.Random(self._seed), Watch("learner")
        for thread in self._threads:
            thread.start()
        for turn in range(updates):
            put(self.weights, 0, turn, version=turn)
            messages = self.unrolls.take(Turn(turn, turn), 0, watch)
            self.learned += names(messages)
            self.ages += [turn - sent.version for sent in messages]
            self._pause(chance, 0.002)
            self.unrolls.finish(turn, 0)
        self.weights.close()
        self.unrolls.close()
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive()

    def _act(self, copy: int) -> None:
        chance, watch, number = random.Random(100 * self._seed + copy), Watch(f"actor-{copy}"), 0
        try:
            while True:
                turn = Turn(number, number)
                (weights,) = self.weights.take(turn, copy, watch)
                self._pause(chance, 0.02 if copy == 0 else 0.002)
                self.unrolls.put(turn, message(copy, number, weights.version), watch)
                self.weights.finish(number, copy)
                number += 1
        except Closed:
            pass

    @staticmethod
    def _pause(chance: random.Random, longest: float) -> None:
        if chance.random() < 0.7:
            time.sleep(longest * chance.random())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("actors", "staleness"), [(1, 0), (3, 0), (3, 2)])
def test_whatever_the_timing_a_run_in_lockstep_repeats(
    seed: int, actors: int, staleness: int
) -> None:
    traffic = Traffic(seed, actors, staleness)
    traffic.run(updates=30)
    assert traffic.learned == [f"{copy}/{turn}" for turn in range(30) for copy in range(actors)]
    assert traffic.ages == [min(turn, staleness) for turn in range(30) for _ in range(actors)]
