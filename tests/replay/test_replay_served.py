"""Trainings whose replay is kept by servers: they compute what the interpreter computes."""

import contextlib
from collections.abc import Generator

import pytest
from agreement import (
    ALGORITHMS,
    CONTINUOUS,
    ENVS,
    HOST,
    HOST_PENDULUM,
    SEED,
    UPDATES,
    assert_close,
    interpreted,
)
from small import STEPS, Started, numbers

from dovetail.algorithm import Task
from dovetail.envs.resolve import resolve
from dovetail.graph.shares import Graphs
from dovetail.plan.ir import LinkKind
from dovetail.policies import ActorLearner, CentralInference, Local
from dovetail.policies.interface import Policy
from dovetail.replay import RateLimiter
from dovetail.replay.remote import Served
from dovetail.replay.server import ReplayServer
from dovetail.served import form_of
from dovetail.telemetry.spans import LINK


def env_of(algorithm: str) -> str:
    return HOST_PENDULUM if algorithm in CONTINUOUS else HOST


@contextlib.contextmanager
def serving(
    algorithm: str, shards: int = 1, tcp: bool = False, envs: int = ENVS
) -> Generator[Served]:
    """The servers of an algorithm's replay."""
    task = Task(resolve(env_of(algorithm)).spec, envs, STEPS, served=Served(shards, "servers"))
    form = form_of(Graphs(ALGORITHMS[algorithm], task).whole)
    assert form is not None
    with contextlib.ExitStack() as stack:
        listen = "127.0.0.1:0" if tcp else None
        made = [
            stack.enter_context(
                ReplayServer(form.table, form.example, form.streams, RateLimiter(), listen=listen)
            )
            for _ in range(shards)
        ]
        addresses = [server.remote if tcp else server.address for server in made]
        yield Served(shards, "servers", tuple(a.text() for a in addresses if a is not None))


POLICIES: dict[str, Policy] = {
    "local": Local(ENVS),
    "2 actors": ActorLearner(ENVS, actors=2, staleness=0),
    "central inference": CentralInference(ENVS, workers=2),
}
CASES = {
    "dqn": ("dqn", "local", 1, False),
    "dqn over TCP": ("dqn", "2 actors", 2, True),
    "prioritised": ("dqn-prioritised", "2 actors", 1, False),
    "prioritised, 2 shards": ("dqn-prioritised", "2 actors", 2, False),
    "prioritised over TCP": ("dqn-prioritised", "local", 1, True),
    "1 actor, 2 shards": ("dqn-prioritised", "local", 2, False),
    "rainbow": ("rainbow", "central inference", 1, False),
    "apex": ("apex", "2 actors", 2, False),
    "r2d2": ("r2d2", "2 actors", 1, False),
    "sac": ("sac", "local", 1, False),
    "d4pg": ("d4pg", "2 actors", 1, False),
}
"""Algorithm, policy, shards, and whether over TCP."""


@pytest.mark.parametrize("case", CASES)
def test_a_served_replay_equals_the_interpreter(case: str) -> None:
    algorithm, policy, shards, tcp = CASES[case]
    env = env_of(algorithm)
    state, actor = interpreted(algorithm, env, shards)
    with (
        serving(algorithm, shards, tcp) as served,
        Started(ALGORITHMS[algorithm], env, POLICIES[policy], seed=SEED, served=served) as running,
    ):
        before = numbers(running.state.params)
        running.advance(1)
        report = running.advance(UPDATES - 1)
    assert abs(numbers(state.params) - before).max() > 1e-4
    assert int(running.state.replay.turn) == UPDATES
    assert_close(running.state._replace(replay=()), state._replace(replay=()))
    assert_close(running.actor, actor)
    links = {link.boundary: link for link in running.plan.links if link.kind is LinkKind.SOCKET}
    spans = {
        span.name: span.nbytes
        for spans in report.spans.values()
        for span in spans
        if span.kind == LINK and span.name in links
    }
    assert spans == {name: link.nbytes for name, link in links.items()}
    assert links["insert"].target == links["sample"].source == "replay"
