"""A run with a replay that is stopped and resumed ends as the run that was not: replay included."""

from typing import Any

import numpy as np
import pytest
from small import LENGTH, QUIET, numbers, saved, stop_after

import dovetail
from dovetail.algorithms import DQN
from dovetail.run.folder import Run
from dovetail.strategies import ActorLearner, Fused, Local

ENVS, UPDATES = 4, 30
STEPS = UPDATES * LENGTH * ENVS
CHAIN = "dovetail:Chain-v0"


def dqn(**options: Any) -> DQN:
    return DQN(
        LENGTH,
        2,
        4,
        num_envs=ENVS,
        buffer_size=64,
        learning_starts=8,
        hidden_sizes=(8,),
        n_step=2,
        **options,
    )


SHARDED = ActorLearner(actors=2, staleness=0, shards=2)


@pytest.mark.parametrize(
    "strategy", [Fused(), Local(), SHARDED], ids=["fused", "local", "2 shards"]
)
@pytest.mark.parametrize("prioritized", [False, True])
def test_it_resumes_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, strategy: Any, prioritized: bool
) -> None:
    what = dqn(prioritized=prioritized), CHAIN, strategy
    straight = saved(dovetail.train(*what, total_steps=STEPS, settings=QUIET))[0]
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(KeyboardInterrupt, match="everything is saved") as stopped:
            dovetail.train(*what, total_steps=STEPS, settings=QUIET)
    run = Run.open(str(stopped.value).rpartition(" ")[2])
    stopped_at = saved(run)[1]["updates"]
    assert 0 < stopped_at < UPDATES
    tree, meta = saved(dovetail.resume(run))
    assert meta["updates"] == UPDATES
    assert int(np.sum(straight["state"].replay.state.counters.begun)) == STEPS
    np.testing.assert_array_equal(numbers(tree["state"]), numbers(straight["state"]))
    np.testing.assert_array_equal(numbers(tree["actor"]), numbers(straight["actor"]))


def test_checkpoints_on_the_way_are_whole(tmp_path: Any) -> None:
    """Each is a cut: what the replay holds is what was inserted by that update."""
    settings = dovetail.Settings(
        *(str(tmp_path / "run"),),
        checkpoint_every=0.0,
        keep=100,
        video=False,
        display="none",
        evaluate_every=0,
        episodes=1,
    )
    run = dovetail.train(dqn(), CHAIN, Local(), total_steps=STEPS, settings=settings)
    steps = sorted(int(p.name) for p in (run.path / "checkpoints").iterdir() if p.name.isdigit())
    assert len(steps) > 2
    for step in steps:
        tree, meta = saved(run, step)
        begun = np.asarray(tree["state"].replay.state.counters.begun)
        assert begun.tolist() == [meta["updates"] * LENGTH] * ENVS
