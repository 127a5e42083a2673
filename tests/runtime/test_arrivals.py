"""Channels of asynchronous actors, without threads."""

from dovetail.boundaries import How
from dovetail.runtime.arrivals import Arrivals, Weights
from dovetail.runtime.channel import ChannelEdge, Message, Turn
from dovetail.runtime.heartbeat import Watch

IDLE = Watch("test")
"""For calls that must not wait: it would never be woken."""


def test_a_slow_copy_finds_the_weights_it_was_admitted_with() -> None:
    """Even if the learner has meanwhile published so many that these are dropped."""
    arrivals = Arrivals(copies=2, joined=1, staleness=1)
    edge = ChannelEdge("broadcast", (0,), How.COPY, 1, 2)
    policy, moments = Weights(edge, arrivals, 0, last=False), Weights(edge, arrivals, 1, last=True)

    def publish(version: int) -> None:
        for channel in (policy, moments):
            channel.put(Turn(version, version), Message(0, version, version, {}), IDLE)

    publish(0)
    turn = Turn(0, 0)
    assert policy.take(turn, 0, IDLE)[0].version == 0
    for version in range(1, 4):
        publish(version)
    assert moments.take(turn, 0, IDLE)[0].version == 0
    later = Turn(1, 1)
    assert policy.take(later, 1, IDLE)[0].version == later.version == 3
