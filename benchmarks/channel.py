"""How long a small message takes from learner to actor and back, over the channels between threads.

    python -m benchmarks.channel [--repeats N] [--quick]

The learner puts weights and takes the actor's results, the actor takes weights and puts its
results: one round trip, without anything learned or acted. Two bare queues are shown beside it.
Both threads are on one core, so that what counts is the link and not how long the machine takes to
wake an idle core; what that adds is shown as well. All take turns in every round, and the median
over rounds counts.
"""

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from dovetail.boundaries import How
from dovetail.runtime.channel import ChannelEdge, Lockstep, Message, Turn
from dovetail.runtime.heartbeat import Watch

TARGET = 15.0
"""Microseconds."""
MESSAGE = {0: np.zeros(4, np.float32)}


def channel_trips(count: int) -> float:
    """Seconds for that many round trips over two of Dovetail's channels, in lockstep."""
    weights = Lockstep(ChannelEdge("broadcast", (0,), How.COPY, 1, 1))
    unrolls = Lockstep(ChannelEdge("gather", (0,), How.JOIN, 1, 1), depth=1)
    learner, actor = Watch("learner"), Watch("actor")

    def act() -> None:
        for number in range(count):
            turn = Turn(number, number)
            [message] = weights.take(turn, 0, actor)
            unrolls.put(turn, Message(0, number, number, message.values), actor)
            weights.finish(number, 0)

    def learn() -> None:
        for number in range(count):
            turn = Turn(number, number)
            weights.put(turn, Message(0, number, number, MESSAGE), learner)
            unrolls.take(turn, 0, learner)
            unrolls.finish(number, 0)

    return timed(learn, act)


def queue_trips(count: int) -> float:
    """The same over a queue in each direction."""
    out: SimpleQueue[object] = SimpleQueue()
    back: SimpleQueue[object] = SimpleQueue()

    def act() -> None:
        for _ in range(count):
            back.put(out.get())

    def learn() -> None:
        for _ in range(count):
            out.put(MESSAGE)
            back.get()

    return timed(learn, act)


def timed(here: Callable[[], None], there: Callable[[], None]) -> float:
    """Seconds until `here` is done, while `there` runs in a thread of its own."""
    thread = threading.Thread(target=there, daemon=True)
    thread.start()
    began = time.perf_counter()
    here()
    seconds = time.perf_counter() - began
    thread.join()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    repeats, count = (3, 2_000) if options.quick else (options.repeats, 20_000)
    every = os.sched_getaffinity(0)
    places = {"one core": {min(every)}, "any core": every}
    contestants = {"two queues": queue_trips, "channels": channel_trips}
    trips: dict[str, list[float]] = {f"{n}, {p}": [] for p in places for n in contestants}
    for _ in range(repeats):
        for place, cores in places.items():
            os.sched_setaffinity(0, cores)
            for name, run in contestants.items():
                trips[f"{name}, {place}"].append(1e6 * run(count) / count)
    medians = {name: statistics.median(found) for name, found in trips.items()}
    for name, median in medians.items():
        print(f"{name:22} {median:6.1f} µs there and back")
    met = "reached" if medians["channels, one core"] <= TARGET else "MISSED"
    print(f"the channels on one core: target {TARGET:g} µs: {met}")
    print(json.dumps({"medians_us": medians, "target_us": TARGET, "trips_us": trips}))


if __name__ == "__main__":
    main()
