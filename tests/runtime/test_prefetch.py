"""A replay that is kept apart and answers ahead: which samples are learned from, and how old what
is inserted may be."""

from typing import Any

import jax
import numpy as np
import pytest
from agreement import ALGORITHMS, CARTPOLE, ENVS, HOST, SEED, UPDATES, assert_close, without_order
from small import LENGTH, STEPS, Started

from dovetail.algorithm import Task
from dovetail.algorithms import DQN
from dovetail.envs.resolve import resolve
from dovetail.graph.interpret import Interpreting
from dovetail.inspection.interpret import stepper
from dovetail.strategies import ActorLearner
from dovetail.training.start import first_state


class Foreseeing(Interpreting):
    """The plain loop whose learner gets the samples that it asked for some iterations ago."""

    answers: list[Any]
    ahead: int

    def sample(self, replay: Any, draws: Any) -> Any:
        replay, found = super().sample(replay, draws)
        self.answers.append(found)
        return replay, self.answers[max(0, len(self.answers) - 1 - self.ahead)]


@pytest.mark.parametrize(("ahead", "shards"), [(0, 1), (1, 1), (2, 2)])
def test_the_learner_gets_what_it_asked_for_some_updates_ago(ahead: int, shards: int) -> None:
    found, answers = resolve(CARTPOLE), list[Any]()
    algorithm = ALGORITHMS["dqn-prioritized"]
    bound = algorithm.bind(Task(found.spec, ENVS, STEPS, shards=shards))
    state, actor = first_state(bound, found.jax, ENVS, SEED)
    for _ in range(UPDATES):
        rl = Foreseeing(bound, jax.jit(stepper(found.jax)), actor)
        rl.answers, rl.ahead = answers, ahead
        state, _ = bound.iteration(rl, state)
        actor = rl.actor
    strategy = ActorLearner(actors=2, staleness=0, shards=shards, prefetch=ahead)
    with Started(algorithm, CARTPOLE, strategy, seed=SEED) as running:
        running.advance(UPDATES)
    assert_close(running.state.params, state.params)
    assert_close(without_order(running.state).replay, without_order(state).replay)


@pytest.mark.parametrize("env", [CARTPOLE, HOST])
def test_ahead_and_unordered_all_is_inserted_and_nothing_is_too_old(env: str) -> None:
    dqn = DQN(
        LENGTH,
        batch_size=4,
        buffer_size=4096,
        learning_starts=1,
        hidden_sizes=(8,),
        prioritized=True,
    )
    strategy = ActorLearner(actors=4, staleness=2, shards=2, processes=False)
    updates = 40
    with Started(dqn, env, strategy, seed=SEED) as running:
        assert running.plan.prefetch == 1 and not running.plan.ordered
        report = running.advance(updates)
        begun = np.asarray(running.state.replay.state.counters.begun)
    assert report.measures["staleness_max"] <= 2
    assert begun.shape == (2, ENVS // 2)
    per_shard = begun.sum(axis=1)
    assert per_shard.max() <= updates * LENGTH * ENVS // 2
    assert per_shard.min() > 0.8 * updates * LENGTH * ENVS // 2  # but for steps that only reset
