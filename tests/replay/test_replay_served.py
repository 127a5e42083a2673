"""Trainings whose replay is kept by servers: they compute what the interpreter computes."""

import contextlib
from collections.abc import Generator

import numpy as np
import pytest
from agreement import (
    ALGORITHMS,
    CARTPOLE,
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

import dovetail
from dovetail import ServedReplay
from dovetail.envs.resolve import resolve
from dovetail.errors import UserError
from dovetail.plan.ir import LinkKind
from dovetail.replay.service.remote import Served
from dovetail.replay.service.server import ReplayServer
from dovetail.strategies import ActorLearner, CentralInference, DataParallel, Fused, Local
from dovetail.strategies.interface import Strategy
from dovetail.telemetry.spans import LINK
from dovetail.training.replay_servers import served_form


def env_of(algorithm: str) -> str:
    return HOST_PENDULUM if algorithm in CONTINUOUS else HOST


@contextlib.contextmanager
def serving(algorithm: str, shards: int = 1, tcp: bool = False) -> Generator[Served]:
    """The servers of an algorithm's replay."""
    spec = resolve(env_of(algorithm)).spec
    form = served_form(ALGORITHMS[algorithm], spec, ENVS, shards)
    with contextlib.ExitStack() as stack:
        listen = "127.0.0.1:0" if tcp else None
        made = [
            stack.enter_context(ReplayServer(form.table, form.example, form.streams, listen=listen))
            for _ in range(shards)
        ]
        addresses = [server.remote if tcp else server.address for server in made]
        yield Served(shards, "servers", tuple(a.text() for a in addresses if a is not None))


STRATEGIES: dict[str, Strategy] = {
    "local": Local(),
    "2 actors": ActorLearner(actors=2, staleness=0),
    "central inference": CentralInference(workers=2),
}
CASES = {
    "dqn": ("dqn", "local", 1, False),
    "dqn over TCP": ("dqn", "2 actors", 2, True),
    "prioritized": ("dqn-prioritized", "2 actors", 1, False),
    "prioritized over TCP": ("dqn-prioritized", "local", 1, True),
    "rainbow": ("rainbow", "central inference", 1, False),
    "apex": ("apex", "2 actors", 2, False),
    "r2d2": ("r2d2", "2 actors", 1, False),
    "sac": ("sac", "local", 1, False),
}
"""Algorithm, strategy, shards, and whether over TCP."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_served_replay_equals_the_interpreter(case: str) -> None:
    algorithm, strategy, shards, tcp = CASES[case]
    env = env_of(algorithm)
    state, actor = interpreted(algorithm, env, shards)
    with (
        serving(algorithm, shards, tcp) as served,
        Started(
            ALGORITHMS[algorithm], env, STRATEGIES[strategy], seed=SEED, served=served
        ) as running,
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


@pytest.mark.slow
def test_the_interpreter_reaches_servers_too() -> None:
    state, _ = interpreted("dqn-prioritized", HOST, 2)
    found = dovetail.interpret(
        ALGORITHMS["dqn-prioritized"], HOST, iterations=UPDATES, total_steps=STEPS,
        seed=SEED, debug=False, replay=ServedReplay(shards=2),
    )  # fmt: skip
    assert_close(found.state._replace(replay=()), state._replace(replay=()))


@pytest.mark.slow
@pytest.mark.parametrize("env", [HOST, CARTPOLE])
def test_actors_ahead_of_the_learner_insert_by_themselves(env: str) -> None:
    strategy = ActorLearner(actors=2, staleness=2)
    with (
        serving("dqn-prioritized", 2) as served,
        Started(ALGORITHMS["dqn-prioritized"], env, strategy, served=served) as running,
    ):
        before = numbers(running.state.params)
        report = running.advance(6)
    assert int(running.state.replay.turn) == 6
    assert np.isfinite(numbers(running.state.params)).all()
    assert abs(numbers(running.state.params) - before).max() > 1e-4
    by_actors = {
        name for name, spans in report.spans.items() if any(s.name == "insert" for s in spans)
    }
    assert by_actors == {"actor-0", "actor-1"}


def test_the_plan_says_where_the_replay_is() -> None:
    found = dovetail.explain(ALGORITHMS["dqn"], HOST, Local(), replay=ServedReplay(shards=2))
    assert "the replay is kept by 2 servers of this machine" in str(found)
    assert "insert → replay" in str(found)
    assert "replay → sample" in str(found)
    assert "2 servers of this machine" in found.svg()
    kinds = {link.boundary: link.kind for link in found.plan.links}
    assert kinds["insert"] is kinds["sample"] is LinkKind.SOCKET


REFUSED: dict[str, tuple[Strategy, str]] = {
    "fused": (Fused(), "the replay is kept by 1 server of this machine: use --strategy local"),
    "2 replicas": (DataParallel(devices=2), "gives its samples to one learner, but there"),
    "shards": (ActorLearner(shards=2), "--shards 2 keeps a replay in shards, but DQN has"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_strategy_that_cannot_reach_servers_is_refused(case: str) -> None:
    strategy, sentence = REFUSED[case]
    env = CARTPOLE if case == "fused" else HOST
    with pytest.raises(UserError, match=sentence):
        dovetail.explain(ALGORITHMS["dqn"], env, strategy, replay="servers")
